// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/varlen_attention/amx/backward.h"
#include "monograph/kernels/varlen_attention/unit.h"

namespace monograph {
namespace {

constexpr ForwardKernel kForward = {kQueryBlock,           kKeyBlock,    forward_packed_bytes,
                                    forward_scratch_bytes, forward_pack, forward_attend};

constexpr BackwardKernel kBackward = {
    kBackwardBlock,         kBackwardBlock,         backward_packed_bytes,   backward_scratch_bytes,
    backward_sums_bytes,    backward_pack_keys,     backward_pack_queries,   backward_sink_gradient,
    backward_differentiate, backward_key_gradients, backward_query_gradients};

constexpr AttentionKernels kKernels = {&kForward, nullptr, &kBackward};

}  // namespace

// bf16 only: fp16 has three bits more than the tiles keep, fp32 sixteen.
template <>
const AttentionKernels* attention_kernels<simd::Amx>(DType dtype) {
  return dtype == DType::kBFloat16 ? &kKernels : nullptr;
}

}  // namespace monograph
