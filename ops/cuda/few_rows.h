// linear for few rows by one fused kernel, straight from the packed bytes.
//
// Nothing here knows a device: the tests run it on the CPU (ops/cuda/tests/panels_on_cpu.cpp).
#pragma once

#include "arguments/linear.h"
#include "cuda/launch.h"

namespace monograph::ops {

// What computes a job, on the stream.
struct FewRowsBackend {
  void (*linear)(const gpu::FewRows& job, void* stream);
  void* stream = nullptr;
};

// Whether a fused kernel serves x on a device of this capability: the weight is packed, and the
// table of crossovers says so.
bool takes_few_rows(int capability, const LinearWeight& weight, const RowsArgument& x);

// gain * (x W^T + u b^T) + bias, rounded once, on checked arguments; u and b come together.
Tensor linear_of_few_rows(const char* op, const FewRowsBackend& backend, const Tensor& x,
                          const LinearWeight& weight, const std::optional<Tensor>& bias,
                          const std::optional<Tensor>& u, const std::optional<Tensor>& b,
                          const std::optional<Tensor>& gain);

}  // namespace monograph::ops
