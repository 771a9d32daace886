// Blocks of ggml to float32. Each value is the exact number of the formula rounded once: products
// are exact in float32, and a minimum is added to them with one rounding.
//
//   Q4_0    d fp16, 16 bytes; byte i holds element i below and i + 16 above; d * (code - 8)
//   Q4_1    d, m fp16, 16 bytes; d * code + m
//   Q5_0    d, 32 fifth bits, 16 bytes; d * (code - 16)
//   Q5_1    d, m, 32 fifth bits, 16 bytes; d * code + m
//   Q8_0    d, 32 signed bytes
//   IQ4_NL  as Q4_0, with a table of sixteen values
//   MXFP4   E8M0, as Q4_0 with E2M1, whose code 8 is +0; an E8M0 of 255 is NaN in the format, 2^128
//           in ggml: refused by verify
//   Q4_K    d, dmin, 12 bytes with 8 scales and 8 minima of six bits, 4 times 32 bytes: 32 low
//           nibbles, then 32 high ones; d * scale * code - dmin * min
//   Q5_K    the same with 32 bytes of fifth bits before the nibbles: bit s of byte i is that of
//           element i of part s
//   Q6_K    128 bytes of low nibbles, 64 of high pairs, 16 signed scales, d last;
//           d * scale * (code - 32), a scale for 16 elements
//   IQ4_XS  d, the high pairs of 8 scales, their low nibbles, 8 times 16 bytes as in IQ4_NL;
//           d * (scale - 32) * table
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "monograph/base/float_types.h"
#include "monograph/gguf/tensor_type.h"

namespace monograph::gguf {

// `count` blocks of `type` (elements, for plain floats), at any alignment.
void decode(TensorType type, const std::uint8_t* blocks, std::size_t count, float* out);

// One block of 256 elements; `type` is one of theirs.
using BlockDecoder = void (*)(const std::uint8_t* block, float* out);
BlockDecoder superblock_decoder(TensorType type);

// A float, Fp16 or Bf16 at any alignment.
template <class T>
float float_at(const std::uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return to_float(value);
}

// What four bits mean in IQ4_NL and IQ4_XS.
inline constexpr float kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                         1,    13,   25,  38,  53,  69,  89,  113};

// Twice what they mean in MXFP4; the scale is halved for it.
inline constexpr float kMxfp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

}  // namespace monograph::gguf
