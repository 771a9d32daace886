// monograph::linear_cross_entropy and linear_log_probs for CUDA tensors. The gradients of a plain
// weight and of the entropy run their portable implementations.
#include <tuple>

#include "arguments/device.h"
#include "cuda/loss_panels.h"
#include "cuda/panels_on_cuda.h"

namespace monograph::ops {
namespace {

LossOfHead loss_on_cuda(const char* op, const Tensor& x, const Tensor& values,
                        const std::vector<Tensor>& scales, const std::vector<std::int64_t>& layout,
                        const std::optional<Tensor>& bias, const Tensor& labels, double softcap,
                        double scale, bool need_dx, bool statistics) {
  check_device(
      op, DeviceType::CUDA,
      {{"x", x}, {"values", values}, {"scales", scales}, {"bias", bias}, {"labels", labels}});
  const HeadArguments head =
      check_head(op, x, values, scales, layout, bias, labels, softcap, scale);
  const CudaDevice device(x.get_device_index());
  const LossBackend backend = {panels_on(device), gpu::launch_loss_rows};
  return loss_by_panels(op, backend, head, x, values, bias, need_dx, statistics);
}

std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_cuda(
    const Tensor& x, const Tensor& values, const std::vector<Tensor>& scales,
    const std::vector<std::int64_t>& layout, const std::optional<Tensor>& bias,
    const Tensor& labels, double softcap, double scale, bool need_dx) {
  const LossOfHead found = loss_on_cuda("linear_cross_entropy", x, values, scales, layout, bias,
                                        labels, softcap, scale, need_dx, /*statistics=*/false);
  return {found.loss, found.lse, found.dx};
}

// Log-probabilities, entropy, squares, mean, top, log-sum-exp, dx.
using LogProbs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

LogProbs linear_log_probs_cuda(const Tensor& x, const Tensor& values,
                               const std::vector<Tensor>& scales,
                               const std::vector<std::int64_t>& layout,
                               const std::optional<Tensor>& bias, const Tensor& labels,
                               double softcap, double scale, bool need_dx) {
  const LossOfHead found = loss_on_cuda("linear_log_probs", x, values, scales, layout, bias, labels,
                                        softcap, scale, need_dx, /*statistics=*/true);
  return {negated(found.loss), *found.entropy, *found.log_sum_squares, *found.mean, *found.top,
          found.lse,           found.dx};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CUDA, m) {
  m.impl("linear_cross_entropy", TORCH_BOX(&linear_cross_entropy_cuda));
  m.impl("linear_log_probs", TORCH_BOX(&linear_log_probs_cuda));
}

}  // namespace monograph::ops
