// Where the bytes of a quantised weight go, so that ranges of it can be quantised on their own.
#pragma once

#include <cstdint>

#include "monograph/quant_methods/conversion.h"

namespace monograph {

class PackedLayout {
 public:
  // For matrices of rows x cols elements. In a format whose blocks do not know matrices all of them
  // are one. Throws Error naming the weight if its rows cannot be blocks of the format.
  PackedLayout(const Conversion& conversion, std::uint64_t matrices, std::uint64_t rows,
               std::uint64_t cols);
  explicit PackedLayout(const Conversion& conversion);

  const FormatInfo& info() const { return info_; }
  // Each has its own grid of blocks and its own scale of a whole matrix; no range crosses them.
  std::uint64_t matrices() const { return matrices_; }
  std::uint64_t matrix_elements() const { return rows_ * cols_; }
  std::uint64_t elements() const { return matrices_ * rows_ * cols_; }
  std::uint64_t blocks() const;
  ScaleKind kind() const { return info_.kinds.front(); }
  ScaleRule rule() const { return rule_; }
  bool has_zero_points() const { return rule_ == ScaleRule::kMinMax; }
  std::size_t scale_bytes() const { return size_bytes(kind()); }
  // Ranges begin at a multiple of this many elements: whole blocks.
  std::uint64_t unit() const;
  // About `elements` elements in whole units; at least one unit.
  std::uint64_t range(std::uint64_t elements) const;
  // The first block of a range that begins here.
  std::uint64_t block_at(std::uint64_t begin) const;
  // The bytes of the values before this element, the first of a range; or of a row.
  std::uint64_t value_bytes(std::uint64_t elements) const;

  // The work for the `count` elements of one range. `zeros` is for zero points, `tensor` the scale
  // of its matrix, for a format that has one.
  QuantizeJob job(DType dtype, const void* input, std::uint64_t count, std::uint8_t* values,
                  std::uint8_t* scales, std::uint8_t* zeros, const TensorScales* tensor) const;

 private:
  const FormatInfo& info_;
  std::size_t block_;
  std::uint64_t matrices_, rows_, cols_;
  NonFinite nonfinite_;
  ScaleRule rule_;
};

}  // namespace monograph
