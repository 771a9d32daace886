// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/seeded_dropout/generic.h"
#include "monograph/simd/row_lanes_neon.h"
#include "monograph/simd/words_neon.h"

namespace monograph {
template DropoutFn* seeded_dropout_variant<simd::Neon>(DType);
}  // namespace monograph
