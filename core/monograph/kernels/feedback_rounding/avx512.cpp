// Compiled with the flags of this instruction set and nothing else.
#include "monograph/cpu/tags.h"
#include "monograph/kernels/feedback_rounding/generic.h"

namespace monograph {
template FeedbackFn* feedback_variant<simd::Avx512>(Format);
template void feedback_step<simd::Avx512>(const FeedbackStep&);
}  // namespace monograph
