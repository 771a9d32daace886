// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/rms_norm/generic.h"
#include "monograph/simd/row_lanes_neon.h"

namespace monograph {
template const RmsNormKernels* rms_norm_variant<simd::Neon>(DType, DType);
}  // namespace monograph
