// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/gated_delta_rule/amx/lanes.h"
#include "monograph/kernels/gated_delta_rule/amx/products.h"
#include "monograph/kernels/gated_delta_rule/vector/backward.h"
#include "monograph/kernels/gated_delta_rule/vector/forward.h"

namespace monograph {
namespace {

using Forward = DeltaForward<simd::Amx, Bf16, DeltaTileProducts>;
using Backward = DeltaBackward<simd::Amx, Bf16, DeltaTileProducts>;

constexpr DeltaRuleKernels kKernels = {Forward::bytes, Forward::run, nullptr, Backward::bytes,
                                       Backward::run};

}  // namespace

// bf16 only: fp16 has three bits more than the tiles keep, fp32 sixteen.
template <>
const DeltaRuleKernels* delta_rule_kernels<simd::Amx>(DType dtype) {
  return dtype == DType::kBFloat16 ? &kKernels : nullptr;
}

}  // namespace monograph
