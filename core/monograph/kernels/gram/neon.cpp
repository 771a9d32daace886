// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/gram/generic.h"
#include "monograph/simd/row_lanes_neon.h"

namespace monograph {
template const GramKernels* gram_variant<simd::Neon>(DType);
}  // namespace monograph
