// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/seeded_dropout/generic.h"
#include "monograph/simd/row_lanes_scalar.h"
#include "monograph/simd/words_scalar.h"

namespace monograph {
template DropoutFn* seeded_dropout_variant<simd::Scalar>(DType);
}  // namespace monograph
