// Compiled with the flags of this instruction set and nothing else.
#include "monograph/simd/avx2.h"

#include "monograph/kernels/quantize/generic.h"

namespace monograph {
template QuantizeFn* quantize_variant<simd::Avx2>(Format);
template AbsmaxFn* absmax_variant<simd::Avx2>();
}  // namespace monograph
