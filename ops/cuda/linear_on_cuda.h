// linear on checked arguments: a fused kernel for few rows, panels for more.
#pragma once

#include "cuda/few_rows.h"
#include "cuda/linear_panels.h"
#include "cuda/panels_on_cuda.h"

namespace monograph::ops {

inline FewRowsBackend few_rows_on(const CudaDevice& device) {
  return {gpu::launch_linear, device.stream()};
}

inline Tensor linear_on_cuda(const char* op, const CudaDevice& device, const Tensor& x,
                             const PanelWeight& w, const std::optional<Tensor>& bias,
                             const std::optional<Tensor>& u, const std::optional<Tensor>& b) {
  if (takes_few_rows(device.capability(), w.weight, rows_of(op, "x", x)))
    return linear_of_few_rows(op, few_rows_on(device), x, w.weight, bias, u, b, std::nullopt);
  return linear_by_panels(op, panels_on(device), x, w, bias, u, b);
}

}  // namespace monograph::ops
