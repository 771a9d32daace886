// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/gated_delta_rule/unit.h"

namespace monograph {

// bf16 only: fp16 has three bits more than the tiles keep, fp32 sixteen.
template <>
const DeltaRuleKernels* delta_rule_kernels<simd::Amx>(DType) {
  return nullptr;
}

}  // namespace monograph
