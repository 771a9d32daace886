// Bytes from outside to a view that kernels may trust: every size is checked here, for every format
// by its row in the table. The operators and the readers of checkpoints both come through here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "monograph/formats/slice.h"

namespace monograph {

// Bytes of another device are measured here and never read.
enum class Memory { kHost, kDevice };

struct ByteSpan {
  const std::uint8_t* data = nullptr;
  std::size_t size = 0;
  Memory memory = Memory::kHost;
};

// `shape` is the logical shape, (rows, cols) or (experts, rows, cols) or more; `scales` are
//   {blocks}                                  any format
//   {codes, groups, map, offset}              double-quantised
//   {blocks, tensor}                          with a tensor scale: one number, or one a matrix
//   {blocks, zero points}                     groups of a row: blocks may be one scale for all
//   {} or {row map}                           scales beside the values: int32, the stored row of
//                                             each row; `values` may then have other rows too
// The kind of the block scales follows from their size, or from the format where it has one. Throws
// Error that names the thing, the value found and the value wanted. The bytes must outlive the
// view.
//
// With an `origin` the weight is a part of a larger one: `values` and `scales` begin, with a block
// and with a group of 256, that many elements before it, and end with it. Blocks that know rows
// want whole rows of one matrix.
PackedView bind_packed(const FormatInfo& info, std::size_t block,
                       std::span<const std::size_t> shape, ByteSpan values,
                       std::span<const ByteSpan> scales, std::size_t origin = 0);

// The same for matrices of `grid_rows` rows that were quantised one by one: `values`, blocks,
// groups and zero points of all of them, one behind the other, and one offset or tensor scale each,
// or one for all. A stack of matrices of groups of a row, or of blocks with their scales, is bound
// like this.
PackedGrids bind_grids(const FormatInfo& info, std::size_t block,
                       std::span<const std::size_t> shape, std::size_t grid_rows, ByteSpan values,
                       std::span<const ByteSpan> scales);

// The product of the dimensions of a shape, those of 0 left out, is at most this: no count of
// elements, blocks, bits or bytes that follows from a shape can overflow.
inline constexpr std::size_t kMostElements = std::size_t{1} << 56;

// rows, cols and matrix_rows of a shape; throws Error where it exceeds kMostElements or rows are
// not whole blocks.
struct MatrixShape {
  std::size_t matrices = 1, rows = 1, cols = 1;  // rows of one matrix
  std::size_t elements() const { return matrices * rows * cols; }
};
MatrixShape matrix_shape(const FormatInfo& info, std::size_t block,
                         std::span<const std::size_t> shape);

}  // namespace monograph
