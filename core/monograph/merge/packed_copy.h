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
  // Of groups of a row, after quantize() of whole rows from `row` on: a group takes the scale and
  // the zero point that it has in `grid`, a view of the same packing, where its values fit there.
  // Codes are left as they are, for set_codes(). `base` are the values of `grid`: a group that has
  // less than half of their magnitude wants a finer scale.
  void keep_scales(const PackedView& grid, std::size_t row, std::span<const float> base,
                   std::span<const double> merged);
  // All of it, codes included, as it lies: instead of quantize().
  void take(const PackedView& grid);
  // Whether `grid` has the packing of this copy: keep_scales() and take() are for it.
  bool has_packing_of(const PackedView& grid) const;
  // Takes the place of the values of elements from `at`, which begin a byte: one code a byte, of
  // integers signed; of groups of a row whole rows. May follow finish().
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
  void take_scale(const PackedView& grid, std::size_t at);

  const Conversion& conversion_;
  PackedLayout layout_;
  std::array<std::size_t, 3> shape_;
  std::vector<std::uint8_t> values_, codes_, zero_points_;
  PackedScales scales_;
  std::vector<float> groups_, tensors_;
  PackedView view_;
};

}  // namespace monograph
