// Compiled with the flags of this instruction set and nothing else.
#include "monograph/simd/avx512.h"

#include "monograph/kernels/quantize/generic.h"
#include "monograph/kernels/quantize/strip_avx512.h"

namespace monograph {
template QuantizeFn* quantize_variant<simd::Avx512>(Format);
template AbsmaxFn* absmax_variant<simd::Avx512>();
}  // namespace monograph
