// Compiled with the flags of this instruction set and nothing else.
#include "monograph/simd/scalar.h"

#include "monograph/kernels/quantize/generic.h"

namespace monograph {
template QuantizeFn* quantize_variant<simd::Scalar>(Format);
template AbsmaxFn* absmax_variant<simd::Scalar>();
}  // namespace monograph
