// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/gated_activation/generic.h"
#include "monograph/simd/row_lanes_avx512.h"

namespace monograph {
template const GatedKernels* gated_activation_variant<simd::Avx512>(DType, Activation);
}  // namespace monograph
