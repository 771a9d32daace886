// monograph::linear_scaled for CUDA tensors. Of many rows the products are rounded before the gain,
// as in the portable implementation.
#include "arguments/device.h"
#include "cuda/linear_on_cuda.h"

namespace monograph::ops {
namespace {

Tensor linear_scaled_cuda(const Tensor& x, const Tensor& values, const std::vector<Tensor>& scales,
                          const std::vector<std::int64_t>& layout, const Tensor& gain,
                          const Tensor& u, const Tensor& b, const Tensor& a) {
  const char* const op = "linear_scaled";
  check_device(op, DeviceType::CUDA,
               {{"x", x},
                {"values", values},
                {"scales", scales},
                {"gain", gain},
                {"u", u},
                {"b", b},
                {"a", a}});
  const LinearArguments arguments =
      check_linear(op, x, values, scales, layout, std::nullopt, u, b, a);
  vector_of(op, "gain", gain, arguments.weight.packed.rows, DType::kFloat32);
  const CudaDevice device(x.get_device_index());
  if (takes_few_rows(device.capability(), arguments.weight, arguments.x))
    return linear_of_few_rows(op, few_rows_on(device), x, arguments.weight, std::nullopt, u, b,
                              gain);
  const Tensor sums =
      linear_by_panels(op, panels_on(device), x, {arguments.weight, values}, std::nullopt, u, b);
  return in_type(times(sums, gain), x.scalar_type());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CUDA, m) {
  m.impl("linear_scaled", TORCH_BOX(&linear_scaled_cuda));
}

}  // namespace monograph::ops
