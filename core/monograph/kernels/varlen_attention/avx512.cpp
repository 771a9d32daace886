// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/varlen_attention/vector/kernels.h"
#include "monograph/kernels/varlen_attention/vector/transpose_avx512.h"
#include "monograph/simd/lanes_avx512.h"

namespace monograph {
template const AttentionKernels* attention_kernels<simd::Avx512>(DType);
}  // namespace monograph
