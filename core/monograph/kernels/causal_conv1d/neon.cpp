// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/causal_conv1d/generic.h"
#include "monograph/simd/row_lanes_neon.h"

namespace monograph {
template const ConvKernels* causal_conv1d_variant<simd::Neon>(DType);
}  // namespace monograph
