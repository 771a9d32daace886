// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/linear_cross_entropy/generic.h"
#include "monograph/simd/lanes_avx512.h"

namespace monograph {
template const CrossEntropyKernels* find_cross_entropy<simd::Avx512>(DType);
}  // namespace monograph
