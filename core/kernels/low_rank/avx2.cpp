// Compiled with the flags of this instruction set and nothing else.
#include "kernels/low_rank/generic.h"
#include "simd/tags.h"

namespace monograph {
template void add_low_rank_with<simd::Avx2>(const LowRankJob&, std::size_t);
}  // namespace monograph
