// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/gated_activation/generic.h"
#include "monograph/simd/row_lanes_neon.h"

namespace monograph {
template const GatedKernels* gated_activation_variant<simd::Neon>(DType, Activation);
}  // namespace monograph
