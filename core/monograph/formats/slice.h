// Weights that are cut: rows of a weight, and a weight whose parts were quantised one by one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "monograph/formats/packed_view.h"

namespace monograph {

// Rows [first, first + count): the same bytes, seen from another origin, for every format and for a
// plain weight. Rows of one matrix of several are one matrix: its own grid, its own tensor scale.
// Throws Error where the weight has fewer rows.
PackedView slice_rows(const PackedView& weight, std::size_t first, std::size_t count);

// `count` matrices of the same shape that were quantised one by one and then laid one behind the
// other, as the experts of a folder that stores each on its own, or gate and up within them. Bytes,
// blocks, groups of 256, words of zero points and square blocks start anew with each, and each has
// an offset and a tensor scale of its own. The map is shared. A weight of one grid is `count` = 1.
struct PackedGrids {
  PackedView first;
  std::size_t count = 1;
  // From one grid to the next.
  std::size_t value_bytes = 0, block_bytes = 0, group_bytes = 0, zero_bytes = 0;
  const std::uint8_t* offsets = nullptr;  // fp32, one a grid, or none
  bool tensor_each = false;

  std::size_t rows() const { return count * first.rows; }
  PackedView grid(std::size_t i) const;
};

// Rows of all grids counted through; throws Error where they lie in more than one grid.
PackedView slice_rows(const PackedGrids& weight, std::size_t first, std::size_t count);

// Two stacks of one interleaved format as one whose rows alternate within each grid: row 2 i of a
// grid is row i of that of `even`, row 2 i + 1 of that of `odd`. Throws Error where the two are not
// alike, or have a row map.
PackedGrids alternating(const PackedGrids& even, const PackedGrids& odd);

}  // namespace monograph
