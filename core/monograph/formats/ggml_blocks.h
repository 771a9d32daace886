// ggml's blocks of 32 elements, as they lie in a GGUF file: d and m are fp16.
//   Q8_0    d, 32 signed bytes; d * code
//   Q4_0    d, 16 bytes; byte i holds element i below and i + 16 above; d * (code - 8)
//   Q4_1    d, m, 16 bytes; d * code + m
//   Q5_0    d, 32 fifth bits, 16 bytes; d * (code - 16)
//   Q5_1    d, m, 32 fifth bits, 16 bytes; d * code + m
//   IQ4_NL  as Q4_0, with a table of sixteen values; d * table
//   MXFP4   e, 16 bytes as Q4_0; 2^(e - 128) * table, twice the values of E2M1. Elements of the
//           format `mxfp4` in another order, and: code 8 is +0, e = 255 is 2^127, not NaN
#pragma once

#include "monograph/formats/interleaved.h"

namespace monograph {

template <Format kNumber, std::size_t kSize>
struct GgmlBlock {
  static constexpr Format kFormat = kNumber;
  static constexpr BlockShape kShape = BlockShape::kInterleaved;
  static constexpr std::size_t kBlock = 32, kBytes = kSize;
};

struct Q8_0 : GgmlBlock<Format::kQ8_0, 34> {
  template <class V, class T>
  [[gnu::always_inline]] static void decode_part(const std::uint8_t* block, std::size_t, T* out) {
    decode_codes<kPart, V>(block + 2, 0, V::half_at(block), out);
  }
};

struct Q4_0 : GgmlBlock<Format::kQ4_0, 18> {
  template <class V, class T>
  [[gnu::always_inline]] static void decode_part(const std::uint8_t* block, std::size_t, T* out) {
    PartCodes codes;
    take_halves(block + 2, codes);
    decode_codes<kPart, V>(codes.bytes, 8, V::half_at(block), out);
  }
};

struct Q4_1 : GgmlBlock<Format::kQ4_1, 20> {
  template <class V, class T>
  [[gnu::always_inline]] static void decode_part(const std::uint8_t* block, std::size_t, T* out) {
    PartCodes codes;
    take_halves(block + 4, codes);
    decode_codes_less<V>(codes, V::half_at(block), -V::half_at(block + 2), out);
  }
};

struct Q5_0 : GgmlBlock<Format::kQ5_0, 22> {
  template <class V, class T>
  [[gnu::always_inline]] static void decode_part(const std::uint8_t* block, std::size_t, T* out) {
    PartCodes codes;
    take_halves(block + 6, codes);
    add_fifth(block + 2, codes);
    decode_codes<kPart, V>(codes.bytes, 16, V::half_at(block), out);
  }
};

struct Q5_1 : GgmlBlock<Format::kQ5_1, 24> {
  template <class V, class T>
  [[gnu::always_inline]] static void decode_part(const std::uint8_t* block, std::size_t, T* out) {
    PartCodes codes;
    take_halves(block + 8, codes);
    add_fifth(block + 4, codes);
    decode_codes_less<V>(codes, V::half_at(block), -V::half_at(block + 2), out);
  }
};

// What four bits mean in IQ4_NL and IQ4_XS, as signed bytes.
inline constexpr std::uint8_t kIq4Bytes[16] = {
    256 - 127, 256 - 104, 256 - 83, 256 - 65, 256 - 49, 256 - 35, 256 - 22, 256 - 10,
    1,         13,        25,       38,       53,       69,       89,       113};

// Sixteen bytes of nibbles to the table's values.
template <class V>
[[gnu::always_inline]] inline void take_iq4(const std::uint8_t* bytes, PartCodes& codes) {
  take_halves(bytes, codes);
  V::lookup_bytes(kIq4Bytes, codes.bytes);
}

// What four bits mean in MXFP4, as signed bytes.
inline constexpr std::uint8_t kTwiceE2m1Bytes[16] = {
    0, 1, 2, 3, 4, 6, 8, 12, 0, 256 - 1, 256 - 2, 256 - 3, 256 - 4, 256 - 6, 256 - 8, 256 - 12};

// 2^(e - 128), subnormal for 0 and 1: the scale of twice the values.
[[gnu::always_inline]] inline float half_e8m0_at(const std::uint8_t* e) {
  const std::uint32_t exponent = *e;
  return std::bit_cast<float>(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
}

struct Iq4Nl : GgmlBlock<Format::kIq4Nl, 18> {
  template <class V, class T>
  [[gnu::always_inline]] static void decode_part(const std::uint8_t* block, std::size_t, T* out) {
    PartCodes codes;
    take_iq4<V>(block + 2, codes);
    decode_codes<kPart, V>(codes.bytes, 0, V::half_at(block), out);
  }
};

struct GgmlMxfp4 : GgmlBlock<Format::kGgmlMxfp4, 17> {
  template <class V, class T>
  [[gnu::always_inline]] static void decode_part(const std::uint8_t* block, std::size_t, T* out) {
    PartCodes codes;
    take_halves(block + 1, codes);
    V::lookup_bytes(kTwiceE2m1Bytes, codes.bytes);
    decode_codes<kPart, V>(codes.bytes, 0, half_e8m0_at(block), out);
  }
};

}  // namespace monograph
