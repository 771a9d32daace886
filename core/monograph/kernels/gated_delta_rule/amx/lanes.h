// The vocabulary of AVX-512 under the tag of this unit. Included by amx.cpp only.
#pragma once

#include "monograph/simd/amx.h"
#include "monograph/simd/lanes_avx512.h"

namespace monograph {

template <>
struct Lanes<simd::Amx> : Lanes<simd::Avx512> {};

}  // namespace monograph
