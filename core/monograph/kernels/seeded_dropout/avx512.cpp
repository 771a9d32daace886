// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/seeded_dropout/generic.h"
#include "monograph/simd/row_lanes_avx512.h"
#include "monograph/simd/words_avx512.h"

namespace monograph {
template DropoutFn* seeded_dropout_variant<simd::Avx512>(DType);
}  // namespace monograph
