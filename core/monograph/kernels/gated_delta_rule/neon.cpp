// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/gated_delta_rule/vector/kernels.h"
#include "monograph/simd/lanes_neon.h"

namespace monograph {
template const DeltaRuleKernels* delta_rule_kernels<simd::Neon>(DType);
}  // namespace monograph
