// Scales that ggml packs for the parts of a block of 256 elements; the layouts: decode_blocks.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace monograph::gguf {

struct ScaleAndMinimum {
  float scale, minimum;
};

// Q4_K, Q5_K: part 0 to 7 of twelve bytes. The first four hold six bits as they are in bytes 0 to 3
// and 4 to 7, whose top pairs belong to the other four, and whose low four bits are in bytes 8
// to 11.
inline ScaleAndMinimum six_bits(const std::uint8_t* packed, std::size_t part) {
  if (part < 4) {
    return {static_cast<float>(packed[part] & 63), static_cast<float>(packed[part + 4] & 63)};
  }
  const unsigned low = packed[part + 4];
  return {static_cast<float>((low & 15u) | (packed[part - 4] >> 6) << 4),
          static_cast<float>((low >> 4) | (packed[part] >> 6) << 4)};
}

// IQ4_XS: part 0 to 7 of a block.
inline float scale_of_iq4_xs(const std::uint8_t* block, std::size_t part) {
  const unsigned pairs = block[2] | static_cast<unsigned>(block[3]) << 8;
  const unsigned four = block[4 + part / 2] >> (part % 2 * 4) & 15u;
  const unsigned six = four | (pairs >> (2 * part) & 3u) << 4;
  return static_cast<float>(static_cast<int>(six) - 32);
}

}  // namespace monograph::gguf
