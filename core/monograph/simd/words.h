// Integers of 32 bits in lanes of 64, for generators that multiply them. Words<V> is specialised
// beside the intrinsics, in words_<isa>.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "monograph/cpu/tags.h"

namespace monograph {

// kLanes, Word, set, counted (n, n + 1, ...), upper (the upper 32 bits), mul (of the lower 32 bits,
// all 64 of the product), exclusive_or, and store_fours: of four words the lower 32 bits of lane 0,
// then of lane 1, ...: 4 * kLanes numbers.
template <class V>
struct Words;

}  // namespace monograph
