// Compiled with the flags of this instruction set and nothing else.
#include "kernels/linear_cross_entropy/generic.h"
#include "simd/lanes_avx2.h"

namespace monograph {
template const CrossEntropyKernels* find_cross_entropy<simd::Avx2>(DType);
}  // namespace monograph
