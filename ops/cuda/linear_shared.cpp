// monograph::linear_shared and linear_shared_dx for CUDA tensors: one weight after another.
//
// bias, u, b and a are empty or have one entry per weight.
#include "arguments/linear_shared.h"

#include "arguments/device.h"
#include "cuda/linear_on_cuda.h"

namespace monograph::ops {
namespace {

std::optional<Tensor> entry(const std::vector<Tensor>& list, std::size_t i) {
  if (list.empty()) return std::nullopt;
  return list[i];
}

std::vector<Tensor> linear_shared_cuda(const Tensor& x, const std::vector<Tensor>& values,
                                       const std::vector<Tensor>& scales,
                                       const std::vector<std::int64_t>& layouts,
                                       const std::vector<Tensor>& bias,
                                       const std::vector<Tensor>& u, const std::vector<Tensor>& b,
                                       const std::vector<Tensor>& a) {
  const char* const op = "linear_shared";
  check_device(op, DeviceType::CUDA,
               {{"x", x},
                {"values", values},
                {"scales", scales},
                {"bias", bias},
                {"u", u},
                {"b", b},
                {"a", a}});
  const LinearSharedArguments found =
      check_linear_shared(op, x, values, scales, layouts, bias, u, b, a);
  const CudaDevice device(x.get_device_index());
  std::vector<Tensor> results;
  results.reserve(values.size());
  for (std::size_t i = 0; i < values.size(); ++i)
    results.push_back(linear_on_cuda(op, device, x, {found.weights[i], values[i]}, entry(bias, i),
                                     entry(u, i), entry(b, i)));
  return results;
}

Tensor linear_shared_dx_cuda(const std::vector<Tensor>& dy, const std::vector<Tensor>& values,
                             const std::vector<Tensor>& scales,
                             const std::vector<std::int64_t>& layouts,
                             const std::vector<Tensor>& du, const std::vector<Tensor>& a) {
  const char* const op = "linear_shared_dx";
  check_device(op, DeviceType::CUDA,
               {{"dy", dy}, {"values", values}, {"scales", scales}, {"du", du}, {"a", a}});
  const LinearSharedDxArguments found =
      check_linear_shared_dx(op, dy, values, scales, layouts, du, a);
  std::vector<GradientTerm> terms;
  terms.reserve(found.terms.size());
  for (std::size_t i = 0; i < du.size(); ++i) terms.push_back(low_rank_term(du[i], a[i]));
  for (std::size_t i = 0; i < dy.size(); ++i)
    terms.push_back({dy[i], found.terms[i].weight, values[i]});
  const CudaDevice device(dy[0].get_device_index());
  return linear_dx_by_panels(op, panels_on(device), terms);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CUDA, m) {
  m.impl("linear_shared", TORCH_BOX(&linear_shared_cuda));
  m.impl("linear_shared_dx", TORCH_BOX(&linear_shared_dx_cuda));
}

}  // namespace monograph::ops
