// Compiled with the flags of this instruction set and nothing else.
#include "monograph/simd/neon.h"

#include "monograph/kernels/quantize/generic.h"

namespace monograph {
template QuantizeFn* quantize_variant<simd::Neon>(Format);
template AbsmaxFn* absmax_variant<simd::Neon>();
}  // namespace monograph
