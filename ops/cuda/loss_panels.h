// The loss of a head by panels, on checked arguments: logits of a chunk of tokens in scratch
// memory, its rows turned into loss and gradient in place, dx from them.
// core/monograph/gpu/panels.h bounds the chunk. Tokens without a label are computed too, and give
// 0: the host does not know them.
//
// Nothing here knows a device: the tests run it on the CPU.
#pragma once

#include "arguments/head.h"
#include "cuda/launch.h"
#include "cuda/panels.h"

namespace monograph::ops {

struct LossBackend {
  PanelBackend panels;
  void (*rows)(const gpu::LossPanel& panel, void* stream);
  std::size_t logits_bytes = gpu::kLogitsBytes;
};

// [tokens] each, but dx [..., cols], or [0] if it is not asked for. Statistics are there on demand.
struct LossOfHead {
  Tensor loss, lse, dx;
  std::optional<Tensor> entropy, log_sum_squares, mean, top;
};
LossOfHead loss_by_panels(const char* op, const LossBackend& backend, const HeadArguments& head,
                          const Tensor& x, const Tensor& values, const std::optional<Tensor>& bias,
                          bool need_dx, bool statistics);

}  // namespace monograph::ops
