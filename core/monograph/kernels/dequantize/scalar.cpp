// Compiled with the flags of this instruction set and nothing else.
#include "monograph/simd/scalar.h"

#include "monograph/kernels/dequantize/generic.h"

namespace monograph {
template DequantizeFn* dequantize_variant<simd::Scalar>(Format);
}  // namespace monograph
