// Compiled with the flags of this instruction set and nothing else.
#include "monograph/cpu/tags.h"
#include "monograph/kernels/low_rank/generic.h"

namespace monograph {
template void add_low_rank_with<simd::Scalar>(const LowRankJob&, std::size_t);
}  // namespace monograph
