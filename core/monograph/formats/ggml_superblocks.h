// ggml's blocks of 256 elements, as they lie in a GGUF file: d and dmin are fp16.
//   Q4_K    d, dmin, 12 bytes with 8 scales and 8 minima of six bits, 4 times 32 bytes: 32 low
//           nibbles, then 32 high ones; d * scale * code - dmin * min
//   Q5_K    the same with 32 bytes of fifth bits before the nibbles: bit s of byte i is that of
//           element i of part s
//   Q6_K    128 bytes of low nibbles, 64 of high pairs, 16 signed scales, d last;
//           d * scale * (code - 32), a scale for 16 elements
//   IQ4_XS  d, the high pairs of 8 scales, their low nibbles, 8 times 16 bytes as in IQ4_NL;
//           d * (scale - 32) * table
#pragma once

#include "monograph/formats/ggml_blocks.h"

namespace monograph {

template <Format kNumber, std::size_t kSize>
struct GgmlSuperblock {
  static constexpr Format kFormat = kNumber;
  static constexpr BlockShape kShape = BlockShape::kInterleaved;
  static constexpr std::size_t kBlock = 256, kBytes = kSize;
};

struct ScaleAndMinimum {
  float scale, minimum;
};

// Of part 0 to 7 in twelve bytes: the first four have six bits as they are in bytes 0 to 3 and 4 to
// 7, whose top pairs belong to the other four, and whose low four bits are in bytes 8 to 11.
template <class V>
[[gnu::always_inline]] inline ScaleAndMinimum six_bits(const std::uint8_t* block,
                                                       std::size_t part) {
  const float d = V::half_at(block), dmin = V::half_at(block + 2);
  const std::uint8_t* packed = block + 4;
  unsigned scale, minimum;
  if (part < 4) {
    scale = packed[part] & 63u;
    minimum = packed[part + 4] & 63u;
  } else {
    scale = (packed[part + 4] & 15u) | (packed[part - 4] >> 6) << 4;
    minimum = (packed[part + 4] >> 4) | (packed[part] >> 6) << 4;
  }
  return {d * static_cast<float>(scale), dmin * static_cast<float>(minimum)};
}

struct Q4K : GgmlSuperblock<Format::kQ4K, 144> {
  template <class V, class T>
  [[gnu::always_inline]] static void decode_part(const std::uint8_t* block, std::size_t part,
                                                 T* out) {
    const auto [scale, minimum] = six_bits<V>(block, part);
    PartCodes codes;
    take_bits(block + 16 + part / 2 * 32, part % 2 * 4, 15, codes);
    decode_codes_less<V>(codes, scale, minimum, out);
  }
};

struct Q5K : GgmlSuperblock<Format::kQ5K, 176> {
  template <class V, class T>
  [[gnu::always_inline]] static void decode_part(const std::uint8_t* block, std::size_t part,
                                                 T* out) {
    const auto [scale, minimum] = six_bits<V>(block, part);
    PartCodes codes;
    take_bits(block + 48 + part / 2 * 32, part % 2 * 4, 15, codes);
    add_bits(block + 16, part, 1, codes);
    decode_codes_less<V>(codes, scale, minimum, out);
  }
};

// Two halves of 128: 64 bytes of low nibbles and 32 of pairs each. The four parts of a half are low
// nibbles of bytes 0 to 31, of 32 to 63, then the high nibbles of the same; pair q is theirs.
struct Q6K : GgmlSuperblock<Format::kQ6K, 210> {
  template <class V, class T>
  [[gnu::always_inline]] static void decode_part(const std::uint8_t* block, std::size_t part,
                                                 T* out) {
    const std::size_t half = part / 4, quarter = part % 4;
    PartCodes codes;
    take_bits(block + half * 64 + quarter % 2 * 32, quarter / 2 * 4, 15, codes);
    add_bits(block + 128 + half * 32, quarter * 2, 3, codes);
    const float d = V::half_at(block + 208);
    const auto scale = [&](std::size_t i) {
      return d * static_cast<float>(static_cast<std::int8_t>(block[192 + part * 2 + i]));
    };
    decode_two<V>(codes, 32, scale(0), scale(1), out);
  }
};

struct Iq4Xs : GgmlSuperblock<Format::kIq4Xs, 136> {
  template <class V, class T>
  [[gnu::always_inline]] static void decode_part(const std::uint8_t* block, std::size_t part,
                                                 T* out) {
    const unsigned pairs = block[2] | static_cast<unsigned>(block[3]) << 8;
    const unsigned four = block[4 + part / 2] >> (part % 2 * 4) & 15u;
    const int six = static_cast<int>(four | (pairs >> (2 * part) & 3u) << 4);
    PartCodes codes;
    take_iq4<V>(block + 8 + part * 16, codes);
    decode_codes<kPart, V>(codes.bytes, 0, V::half_at(block) * static_cast<float>(six - 32), out);
  }
};

}  // namespace monograph
