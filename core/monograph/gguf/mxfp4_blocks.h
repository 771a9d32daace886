// Blocks of a weight in MXFP4 as ggml lays them out: the same codes under the same scales.
#pragma once

#include <cstdint>

#include "monograph/weights/weight.h"

namespace monograph::gguf {

// Whether the weight, or all that it is put together from in order, is MXFP4 of 32 elements.
bool has_mxfp4_blocks(const Weight& weight);

// Elements [begin, end) of such a weight, both multiples of 32: 17 bytes for 32 elements, the
// scale in front, element i in the low half of byte i and element i + 16 in the high one.
void copy_mxfp4_blocks(const Weight& weight, std::uint64_t begin, std::uint64_t end,
                       std::uint8_t* out);

}  // namespace monograph::gguf
