// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/causal_conv1d/generic.h"
#include "monograph/simd/row_lanes_scalar.h"

namespace monograph {
template const ConvKernels* causal_conv1d_variant<simd::Scalar>(DType);
}  // namespace monograph
