// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/varlen_attention/vector/kernels.h"
#include "monograph/simd/lanes_neon.h"

namespace monograph {
template const AttentionKernels* attention_kernels<simd::Neon>(DType);
}  // namespace monograph
