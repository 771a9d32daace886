// monograph::adamw_update: the arithmetic of monograph::adamw on the CPU. That operator checks what
// it is given and counts writes for autograd; this one checks what memory depends on.
#include "monograph/kernels/adamw/adamw.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "arguments/device.h"
#include "stable.h"

namespace monograph::ops {
namespace {

constexpr const char* kOp = "adamw_update";

void check_float32(const std::string& what, const Tensor& tensor, std::int64_t size) {
  STD_TORCH_CHECK(
      tensor.scalar_type() == ScalarType::Float && tensor.numel() == size && tensor.is_contiguous(),
      kOp, ": ", what, " is ", name_of(tensor.scalar_type()), " of ", tensor.numel(),
      " elements, wanted float32, contiguous, of ", size);
}

void check_apart(const std::vector<Tensor>& written) {
  std::vector<std::pair<std::uintptr_t, std::uintptr_t>> spans;
  for (const Tensor& tensor : written) {
    const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
    const auto bytes = static_cast<std::size_t>(tensor.numel()) * sizeof(float);
    if (bytes > 0) spans.emplace_back(begin, begin + bytes);
  }
  std::sort(spans.begin(), spans.end());
  for (std::size_t i = 1; i < spans.size(); ++i)
    STD_TORCH_CHECK(spans[i - 1].second <= spans[i].first, kOp,
                    ": parameters, moments and steps share memory, wanted tensors of their own");
}

Tensor adamw_update(const std::vector<Tensor>& parameters, const std::vector<Tensor>& gradients,
                    const std::vector<Tensor>& exp_avg, const std::vector<Tensor>& exp_avg_sq,
                    const Tensor& steps, const Tensor& learning_rate, double beta1, double beta2,
                    double eps, const std::vector<double>& weight_decay, double max_norm) {
  check_device(kOp, DeviceType::CPU,
               {{"parameters", parameters},
                {"gradients", gradients},
                {"exp_avg", exp_avg},
                {"exp_avg_sq", exp_avg_sq},
                {"steps", steps},
                {"learning_rate", learning_rate}});
  const std::size_t count = parameters.size();
  STD_TORCH_CHECK(gradients.size() == count && exp_avg.size() == count &&
                      exp_avg_sq.size() == count && weight_decay.size() == count && count > 0,
                  kOp, ": ", count, " parameters, ", gradients.size(), " gradients, ",
                  exp_avg.size(), " and ", exp_avg_sq.size(), " moments, ", weight_decay.size(),
                  " weight_decay; wanted one each");
  check_float32("learning_rate", learning_rate, 1);
  const bool own_steps = count > 1 && steps.numel() > 1;
  check_float32("steps", steps, own_steps ? static_cast<std::int64_t>(count) : 1);
  std::vector<AdamwTensor> tensors;
  for (std::size_t i = 0; i < count; ++i) {
    const std::string place = "[" + std::to_string(i) + "]";
    const std::int64_t size = parameters[i].numel();
    check_float32("parameters" + place, parameters[i], size);
    check_float32("exp_avg" + place, exp_avg[i], size);
    check_float32("exp_avg_sq" + place, exp_avg_sq[i], size);
    const Tensor& gradient = gradients[i];
    STD_TORCH_CHECK(gradient.numel() == size && gradient.is_contiguous(), kOp, ": gradients", place,
                    " has ", gradient.numel(), " elements, wanted contiguous, ", size);
    tensors.push_back(
        {static_cast<std::size_t>(size), dtype_of(gradient.scalar_type(), kOp, "gradients"),
         gradient.const_data_ptr(), static_cast<float*>(parameters[i].mutable_data_ptr()),
         static_cast<float*>(exp_avg[i].mutable_data_ptr()),
         static_cast<float*>(exp_avg_sq[i].mutable_data_ptr()), weight_decay[i], 0});
  }
  std::vector<Tensor> written = parameters;
  written.insert(written.end(), exp_avg.begin(), exp_avg.end());
  written.insert(written.end(), exp_avg_sq.begin(), exp_avg_sq.end());
  written.push_back(steps);
  check_apart(written);

  Tensor result = empty(kOp, steps, {}, ScalarType::Float);
  auto& norm = *static_cast<float*>(result.mutable_data_ptr());
  norm = static_cast<float>(gradient_norm(tensors, torch_parallel_for));
  if (!std::isfinite(norm)) return result;
  auto* const counts = static_cast<float*>(steps.mutable_data_ptr());
  for (std::int64_t i = 0; i < steps.numel(); ++i) counts[i] += 1;
  for (std::size_t i = 0; i < count; ++i) tensors[i].step = counts[own_steps ? i : 0];
  const double rate = *static_cast<const float*>(learning_rate.const_data_ptr());
  const bool clips = max_norm > 0 && norm > max_norm;
  adamw(tensors, {rate, beta1, beta2, eps, clips ? static_cast<float>(max_norm / norm) : 1.f},
        torch_parallel_for);
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) { m.impl("adamw_update", TORCH_BOX(&adamw_update)); }

}  // namespace monograph::ops
