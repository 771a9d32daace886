// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/experts/transpose_avx512.h"

namespace monograph {
template const ExpertsKernels* experts_variant<simd::Avx512>(DType);
}  // namespace monograph
