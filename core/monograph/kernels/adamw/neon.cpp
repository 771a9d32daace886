// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/adamw/generic.h"
#include "monograph/simd/row_lanes_neon.h"

namespace monograph {
template const AdamwKernels* adamw_variant<simd::Neon>(DType);
}  // namespace monograph
