// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/rotary/generic.h"
#include "monograph/simd/row_lanes_neon.h"

namespace monograph {
template const RotaryKernels* rotary_variant<simd::Neon>(DType);
}  // namespace monograph
