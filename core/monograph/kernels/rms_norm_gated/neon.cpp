// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/rms_norm_gated/generic.h"
#include "monograph/simd/row_lanes_neon.h"

namespace monograph {
template const GatedNormKernels* rms_norm_gated_variant<simd::Neon>(DType, Gate);
}  // namespace monograph
