// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/rms_norm/generic.h"
#include "monograph/simd/row_lanes_avx2.h"

namespace monograph {
template const RmsNormKernels* rms_norm_variant<simd::Avx2>(DType, DType);
}  // namespace monograph
