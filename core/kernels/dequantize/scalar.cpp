// Compiled with the flags of this instruction set and nothing else.
#include "simd/scalar.h"

#include "kernels/dequantize/generic.h"

namespace monograph {
template DequantizeFn* dequantize_variant<simd::Scalar>(Format);
}  // namespace monograph
