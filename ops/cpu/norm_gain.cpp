#include "cpu/norm_gain.h"

#include "arguments/linear.h"
#include "monograph/base/float_types.h"

namespace monograph::ops {

std::vector<float> gain_of(const char* op, const char* what, const std::optional<Tensor>& weight,
                           std::size_t rows, std::size_t cols, bool one_plus_weight) {
  if (!weight) return std::vector<float>(rows == 0 ? 0 : cols, 1.f);
  const DType dtype = dtype_of(weight->scalar_type(), op, what);
  const RowsArgument row = vector_of(op, what, *weight, cols, dtype);
  if (rows == 0) return {};
  std::vector<float> gain(cols);
  with_type(dtype, [&]<class T>() {
    const T* values = static_cast<const T*>(row.matrix.data);
    for (std::size_t i = 0; i < cols; ++i)
      gain[i] = one_plus_weight ? 1.f + to_float(values[i]) : to_float(values[i]);
  });
  return gain;
}

float epsilon_of(const char* op, double eps) {
  STD_TORCH_CHECK(eps >= 0, op, ": eps is ", eps, ", wanted 0 or more");
  return float32_of(op, "eps", eps);
}

NormRounding rounding_of(bool round_before_weight) {
  return round_before_weight ? NormRounding::kBeforeGain : NormRounding::kOnce;
}

}  // namespace monograph::ops
