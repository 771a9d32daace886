// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/seeded_dropout/generic.h"
#include "monograph/simd/row_lanes_avx2.h"
#include "monograph/simd/words_avx2.h"

namespace monograph {
template DropoutFn* seeded_dropout_variant<simd::Avx2>(DType);
}  // namespace monograph
