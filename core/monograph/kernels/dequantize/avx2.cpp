// Compiled with the flags of this instruction set and nothing else.
#include "monograph/simd/avx2.h"

#include "monograph/kernels/dequantize/generic.h"

namespace monograph {
template DequantizeFn* dequantize_variant<simd::Avx2>(Format);
}  // namespace monograph
