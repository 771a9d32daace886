// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/linear_cross_entropy/generic.h"
#include "monograph/simd/lanes_neon.h"

namespace monograph {
template const CrossEntropyKernels* find_cross_entropy<simd::Neon>(DType);
}  // namespace monograph
