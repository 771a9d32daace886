// A weight quantised in memory, as it would be stored.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "monograph/cpu/parallel.h"
#include "monograph/quant_methods/packed_parts.h"

namespace monograph {

class PackedCopy {
 public:
  // For matrices of rows x cols elements, by the format, block and double_quant of `conversion`,
  // which must outlive it.
  PackedCopy(const Conversion& conversion, std::size_t matrices, std::size_t rows,
             std::size_t cols);

  const PackedLayout& layout() const { return layout_; }
  // Whether the largest magnitude of each matrix must be given before the first element is
  // quantised.
  bool wants_largest() const { return layout_.info().tensor_scale != TensorScale::kNone; }
  void set_largest(std::size_t matrix, float magnitude);
  // Elements of one matrix from `at`, a multiple of layout().unit() within it; all but the last
  // call of a matrix give whole units.
  // Thread safe for ranges that do not overlap. Throws Error naming the weight if one is not
  // finite.
  void quantize(std::size_t at, DType dtype, const void* input, std::size_t count);
  // Takes the place of the values of elements from `at`, which begin a byte: one code a byte. May
  // follow finish().
  void set_codes(std::size_t at, std::span<const std::uint8_t> codes);
  // After all elements: makes the view, with scales as they are stored.
  void finish(ParallelFor parallel_for);

  const PackedView& view() const { return view_; }
  std::span<const std::uint8_t> values() const { return values_; }
  const PackedScales& scales() const { return scales_; }
  // Columns [begin, end) of a row, those of all matrices counted through, as a model reads them:
  // decoded to `dtype`, then widened.
  void read(std::size_t row, std::size_t begin, std::size_t end, DType dtype, float* out) const;

 private:
  const Conversion& conversion_;
  PackedLayout layout_;
  std::array<std::size_t, 3> shape_;
  std::vector<std::uint8_t> values_, codes_, zero_points_;
  PackedScales scales_;
  std::vector<float> groups_, tensors_;
  PackedView view_;
};

}  // namespace monograph
