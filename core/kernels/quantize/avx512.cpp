// Compiled with the flags of this instruction set and nothing else.
#include "simd/avx512.h"

#include "kernels/quantize/generic.h"
#include "kernels/quantize/strip_avx512.h"

namespace monograph {
template QuantizeFn* quantize_variant<simd::Avx512>(Format);
template AbsmaxFn* absmax_variant<simd::Avx512>();
}  // namespace monograph
