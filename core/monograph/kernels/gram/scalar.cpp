// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/gram/generic.h"
#include "monograph/simd/row_lanes_scalar.h"

namespace monograph {
template const GramKernels* gram_variant<simd::Scalar>(DType);
}  // namespace monograph
