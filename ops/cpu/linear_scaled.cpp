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
  const LinearArguments found = check_linear(op, x, values, scales, layout, std::nullopt, u, b, a);
  const std::size_t cols = found.weight.packed.rows;
  const RowsArgument factors = vector_of(op, "gain", gain, cols, DType::kFloat32);
  Tensor y = empty_rows(op, x, cols);
  if (cols == 0) return y;
  const LinearOutput output = {found.weight,
                               {&found.low_rank, 1},
                               nullptr,
                               mutable_rows(y, found.x.matrix.rows, cols),
                               static_cast<const float*>(factors.matrix.data)};
  linear(found.x.dtype, found.x.matrix, {&output, 1}, torch_parallel_for);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("linear_scaled", TORCH_BOX(&linear_scaled_cpu));
}

}  // namespace monograph::ops
