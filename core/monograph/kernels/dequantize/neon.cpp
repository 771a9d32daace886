// Compiled with the flags of this instruction set and nothing else.
#include "monograph/simd/neon.h"

#include "monograph/kernels/dequantize/generic.h"

namespace monograph {
template DequantizeFn* dequantize_variant<simd::Neon>(Format);
}  // namespace monograph
