// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/causal_conv1d/generic.h"
#include "monograph/kernels/causal_conv1d/transpose_avx512.h"

namespace monograph {
template const ConvKernels* causal_conv1d_variant<simd::Avx512>(DType);
}  // namespace monograph
