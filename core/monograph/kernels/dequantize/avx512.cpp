// Compiled with the flags of this instruction set and nothing else.
#include "monograph/simd/avx512.h"

#include "monograph/kernels/dequantize/generic.h"

namespace monograph {
template DequantizeFn* dequantize_variant<simd::Avx512>(Format);
}  // namespace monograph
