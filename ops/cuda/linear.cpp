// monograph::linear and linear_dx for CUDA tensors.
#include "arguments/device.h"
#include "cuda/linear_on_cuda.h"

namespace monograph::ops {
namespace {

Tensor linear_cuda(const Tensor& x, const Tensor& values, const std::vector<Tensor>& scales,
                   const std::vector<std::int64_t>& layout, const std::optional<Tensor>& bias,
                   const std::optional<Tensor>& u, const std::optional<Tensor>& b,
                   const std::optional<Tensor>& a) {
  const char* const op = "linear";
  check_device(op, DeviceType::CUDA,
               {{"x", x},
                {"values", values},
                {"scales", scales},
                {"bias", bias},
                {"u", u},
                {"b", b},
                {"a", a}});
  const LinearArguments arguments = check_linear(op, x, values, scales, layout, bias, u, b, a);
  const CudaDevice device(x.get_device_index());
  return linear_on_cuda(op, device, x, {arguments.weight, values}, bias, u, b);
}

Tensor linear_dx_cuda(const Tensor& dy, const Tensor& values, const std::vector<Tensor>& scales,
                      const std::vector<std::int64_t>& layout, const std::optional<Tensor>& du,
                      const std::optional<Tensor>& a) {
  const char* const op = "linear_dx";
  check_device(op, DeviceType::CUDA,
               {{"dy", dy}, {"values", values}, {"scales", scales}, {"du", du}, {"a", a}});
  const LinearDxArguments arguments = check_linear_dx(op, dy, values, scales, layout, du, a);
  const CudaDevice device(dy.get_device_index());
  std::vector<GradientTerm> terms;
  if (du) terms.push_back(low_rank_term(*du, *a));
  terms.push_back({dy, arguments.terms[0].weight, values});
  return linear_dx_by_panels(op, panels_on(device), terms);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CUDA, m) {
  m.impl("linear", TORCH_BOX(&linear_cuda));
  m.impl("linear_dx", TORCH_BOX(&linear_dx_cuda));
}

}  // namespace monograph::ops
