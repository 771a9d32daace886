// The vocabularies that multiply bf16 pairs, by name only. Products of matrices have units for
// them, everything else runs the code of the level below.
#pragma once

#include "monograph/cpu/tags.h"

namespace monograph {

namespace simd {
struct Avx512Bf16;
}  // namespace simd

template <>
inline constexpr Isa isa_of<simd::Avx512Bf16> = Isa::kAvx512Bf16;

}  // namespace monograph
