// Compiled with the flags of the baseline and nothing else.
#include "monograph/kernels/linear_cross_entropy/generic.h"
#include "monograph/simd/lanes_scalar.h"

namespace monograph {
template const CrossEntropyKernels* find_cross_entropy<simd::Scalar>(DType);
}  // namespace monograph
