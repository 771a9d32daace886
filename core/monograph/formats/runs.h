// Cuts a piece of a row into runs that lie in one scale block each.
#pragma once

#include <cstddef>

#include "monograph/formats/packed_view.h"

namespace monograph {

// The number of the block at (row, col) of a weight with square blocks.
[[gnu::always_inline]] inline std::size_t square_block(const PackedView& weight, std::size_t row,
                                                       std::size_t col) {
  std::size_t first = 0;
  row += weight.origin_row();
  const std::size_t per_row = ceil_div(weight.cols, weight.block);
  if (weight.matrix_rows != 0) {
    first = row / weight.matrix_rows * ceil_div(weight.matrix_rows, weight.block) * per_row;
    row %= weight.matrix_rows;
  }
  return first + row / weight.block * per_row + col / weight.block;
}

// body(element, count, scale): `count` elements from number `element` on share `scale`. Covers
// columns [begin, end) of `row` in order.
template <class F, class Body>
[[gnu::always_inline]] inline void for_each_run(const PackedView& weight, std::size_t row,
                                                std::size_t begin, std::size_t end, Body body) {
  const std::size_t last = weight.element(row, end);
  std::size_t element = weight.element(row, begin);
  std::size_t block, stop;
  if constexpr (F::kShape == BlockShape::kSquare) {
    block = square_block(weight, row, begin);
    stop = element + weight.block - begin % weight.block;
  } else {
    block = element / weight.block;
    stop = (block + 1) * weight.block;
  }
  for (; element < last; ++block, stop += weight.block) {
    const std::size_t run_end = stop < last ? stop : last;
    body(element, run_end - element, F::block_scale(weight, block));
    element = run_end;
  }
}

}  // namespace monograph
