// Cuts a piece of a row into runs that lie in one scale block each.
#pragma once

#include <cstddef>

#include "formats/packed_view.h"

namespace monograph {

// body(element, count, scale): `count` elements from flat index `element` on share `scale`. Covers
// columns [begin, end) of `row` in order.
template <class F, class Body>
[[gnu::always_inline]] inline void for_each_run(const PackedView& weight, std::size_t row,
                                                std::size_t begin, std::size_t end, Body body) {
  const std::size_t last = row * weight.cols + end;
  std::size_t element = row * weight.cols + begin;
  std::size_t block = element / weight.block;
  std::size_t stop = (block + 1) * weight.block;
  for (; element < last; ++block, stop += weight.block) {
    const std::size_t run_end = stop < last ? stop : last;
    body(element, run_end - element, F::block_scale(weight, block));
    element = run_end;
  }
}

}  // namespace monograph
