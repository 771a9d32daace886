// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/experts/generic.h"
#include "monograph/simd/row_lanes_neon.h"

namespace monograph {
template const ExpertsKernels* experts_variant<simd::Neon>(DType);
}  // namespace monograph
