// The one way a kernel sees a packed weight: non-owning, unaligned, checked by whoever made it
// (`bind_packed` in bind.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "monograph/formats/format.h"

namespace monograph {

// Scales of a blockwise format as they lie in the checkpoint: `blocks` holds one number of `kind` a
// block. Double-quantised: `blocks` holds one code a block, and
//   scale[i] = map[blocks[i]] * groups[i / 256] + offset      (two roundings to fp32, never fused).
// With a tensor scale: scale[i] = blocks[i] * tensor or blocks[i] / tensor, one rounding to fp32.
// Groups of a row (BlockShape::kGroup) may have zero points too: element = (code - zero) * scale.
struct ScalesView {
  const std::uint8_t* blocks = nullptr;
  const std::uint8_t* groups =
      nullptr;                        // fp32, one for 256 blocks; nullptr if not double-quantised
  const std::uint8_t* map = nullptr;  // fp32 [256]
  float offset = 0.0f;
  ScaleKind kind = ScaleKind::kFp32;
  const std::uint8_t* tensor = nullptr;  // fp32, one a matrix or one for all; nullptr for none
  std::size_t blocks_per_tensor = 0;     // 0 if one serves all
  bool tensor_divides = false;
  const std::uint8_t* zeros =
      nullptr;  // zero points of groups; nullptr for the middle of the codes
  ZeroPoints zero_points = ZeroPoints::kNone;  // how `zeros` and codes are stored, with or without
  bool one = false;                            // one scale serves all groups
  // On another device the offset is read by the kernel, from here; `offset` is then NaN, so that
  // nobody computes without it. nullptr on the host.
  const std::uint8_t* offset_on_device = nullptr;

  bool double_quantised() const { return groups != nullptr; }
};
inline constexpr std::size_t kScaleGroup = 256;

// rows x cols elements, row-major. A 3-D weight [E, rows, cols] is a view of E * rows rows; square
// blocks start anew with each matrix of `matrix_rows` rows.
//
// A view may be a part of a weight (slice.h): `values`, `scales` and the grid of blocks then begin
// `origin` elements before it. Where blocks know rows, these are whole rows.
struct PackedView {
  Format format = Format::kPlain;
  std::size_t rows = 0, cols = 0;
  std::size_t block = 0;
  const std::uint8_t* values = nullptr;
  ScalesView scales;
  std::size_t matrix_rows = 0;  // 0 if the weight is one matrix
  std::size_t origin = 0;
  // From one row of values to the next, for BlockShape::kGroup and kInterleaved.
  std::size_t row_bytes = 0;
  // int32: the stored row of each row, for kInterleaved; nullptr where rows are stored in order. It
  // begins with `origin`, `values` with stored row 0.
  const std::uint8_t* row_map = nullptr;
  // Rows that alternate between two stacks, for kInterleaved: row 2 i is row i of `values`, row
  // 2 i + 1 of these. nullptr where all are in `values`.
  const std::uint8_t* odd_values = nullptr;

  std::size_t elements() const { return rows * cols; }
  // The number of (row, col) among the elements that `values` and `scales` begin with.
  [[gnu::always_inline]] std::size_t element(std::size_t row, std::size_t col) const {
    return origin + row * cols + col;
  }
  // Whole rows before the view, where blocks know rows.
  [[gnu::always_inline]] std::size_t origin_row() const { return origin == 0 ? 0 : origin / cols; }
  // Where `row` is among the rows of `values`.
  [[gnu::always_inline]] std::size_t stored_row(std::size_t row) const {
    row += origin_row();
    if (row_map == nullptr) return row;
    std::int32_t stored;
    std::memcpy(&stored, row_map + 4 * row, sizeof stored);
    return static_cast<std::size_t>(stored);
  }
  // Its bytes, for kInterleaved.
  [[gnu::always_inline]] const std::uint8_t* row_values(std::size_t row) const {
    const std::size_t stored = stored_row(row);
    if (odd_values == nullptr) return values + stored * row_bytes;
    return (stored % 2 == 0 ? values : odd_values) + stored / 2 * row_bytes;
  }
};

}  // namespace monograph
