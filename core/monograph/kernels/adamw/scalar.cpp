// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/adamw/generic.h"
#include "monograph/simd/row_lanes_scalar.h"

namespace monograph {
template const AdamwKernels* adamw_variant<simd::Scalar>(DType);
}  // namespace monograph
