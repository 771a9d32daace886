// monograph::linear_scaled: `linear` with a gain for each output, met before the only rounding.
#include "arguments/device.h"
#include "arguments/linear.h"
#include "monograph/kernels/linear/linear.h"

namespace monograph::ops {
namespace {

// `a` is only checked here: it tells the autograd formula that u = x * a^T.
Tensor linear_scaled_cpu(const Tensor& x, const Tensor& values, const std::vector<Tensor>& scales,
                         const std::vector<std::int64_t>& layout, const Tensor& gain,
                         const Tensor& u, const Tensor& b, const Tensor& a) {
  const char* const op = "linear_scaled";
  check_device(op, DeviceType::CPU,
               {{"x", x},
                {"values", values},
                {"scales", scales},
                {"gain", gain},
                {"u", u},
                {"b", b},
                {"a", a}});
  const LinearWeight weight = check_weight(op, values, scales, layout);
  const RowsArgument input = rows_of(op, "x", x);
  STD_TORCH_CHECK(input.matrix.cols == weight.packed.cols, op, ": x has ", input.matrix.cols,
                  " columns, the weight has ", weight.packed.cols);
  const RowsArgument factors = vector_of(op, "gain", gain, weight.packed.rows, DType::kFloat32);
  const RowsArgument low = rows_matching(op, "u", u, x, input);
  Tensor b_owner;
  const LinearTerm term = {low.matrix,
                           plain_weight(op, "b", b, weight.packed.rows, low.matrix.cols, b_owner)};
  check_a(op, a, low.matrix.cols, weight.packed.cols);
  Tensor y = empty_rows(op, x, weight.packed.rows);
  if (weight.packed.rows == 0) return y;
  const LinearOutput output = {weight,
                               {&term, 1},
                               nullptr,
                               mutable_rows(y, input.matrix.rows, weight.packed.rows),
                               static_cast<const float*>(factors.matrix.data)};
  linear(input.dtype, input.matrix, {&output, 1}, torch_parallel_for);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("linear_scaled", TORCH_BOX(&linear_scaled_cpu));
}

}  // namespace monograph::ops
