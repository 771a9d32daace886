// What formats share whose scales lie beside the values (BlockShape::kInterleaved): ggml's blocks.
//   element = (code - zero) * scale - minimum, the exact number rounded once to fp32, then to the
//   output type. Products are exact in fp32: 11 bits of an fp16 number, at most 13 of the rest.
// A format F supplies kBlock and kBytes of a block, and decode_part<V, T>(block, part, out): the 32
// elements of a part of it; V::half_at reads an fp16 number. A row map says which stored row is row
// i of the weight; rows of two stacks may alternate.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "monograph/base/float_types.h"
#include "monograph/formats/packed_view.h"

namespace monograph {

inline constexpr std::size_t kPart = 32;

// The codes of a part, a byte each.
struct PartCodes {
  alignas(32) std::uint8_t bytes[kPart];
};

// The 32 codes of a part at once, and sixteen of them: stored whole, so that a load of the vectors
// that follow is forwarded from the store.
using PartWords = std::uint64_t __attribute__((vector_size(32)));
using HalfWords = std::uint64_t __attribute__((vector_size(16)));

inline constexpr std::uint64_t kEveryByte = 0x0101010101010101u;

// codes[i] = bytes[i] >> shift & mask.
[[gnu::always_inline]] inline void take_bits(const std::uint8_t* bytes, std::size_t shift,
                                             std::uint64_t mask, PartWords& codes) {
  PartWords words;
  std::memcpy(&words, bytes, sizeof words);
  codes = words >> shift & mask * kEveryByte;
}

// codes[i] |= (bytes[i] >> shift & mask) << 4.
[[gnu::always_inline]] inline void add_bits(const std::uint8_t* bytes, std::size_t shift,
                                            std::uint64_t mask, PartWords& codes) {
  PartWords words;
  std::memcpy(&words, bytes, sizeof words);
  codes |= (words >> shift & mask * kEveryByte) << 4;
}

// Sixteen bytes: byte i holds element i below and element i + 16 above.
[[gnu::always_inline]] inline void take_halves(const std::uint8_t* bytes, PartWords& codes) {
  HalfWords words;
  std::memcpy(&words, bytes, sizeof words);
  const PartWords twice = __builtin_shufflevector(words, words, 0, 1, 0, 1);
  codes = twice >> PartWords{0, 0, 4, 4} & 15 * kEveryByte;
}

// codes[i] |= bit i of four bytes, as 16.
[[gnu::always_inline]] inline void add_fifth(const std::uint8_t* bits, PartWords& codes) {
  constexpr std::uint64_t kBitOfByte = 0x8040201008040201u;
  // Byte k keeps bit k; what is not 0 reaches bit 7 when 127 is added.
  const PartWords all = {bits[0] * kEveryByte, bits[1] * kEveryByte, bits[2] * kEveryByte,
                         bits[3] * kEveryByte};
  const PartWords set = ((all & kBitOfByte) + 127 * kEveryByte) >> 7 & kEveryByte;
  codes |= set << 4;
}

// The same to and from memory.
[[gnu::always_inline]] inline void take_bits(const std::uint8_t* bytes, std::size_t shift,
                                             std::uint64_t mask, PartCodes& codes) {
  PartWords words;
  take_bits(bytes, shift, mask, words);
  std::memcpy(codes.bytes, &words, sizeof words);
}
[[gnu::always_inline]] inline void add_bits(const std::uint8_t* bytes, std::size_t shift,
                                            std::uint64_t mask, PartCodes& codes) {
  PartWords words;
  std::memcpy(&words, codes.bytes, sizeof words);
  add_bits(bytes, shift, mask, words);
  std::memcpy(codes.bytes, &words, sizeof words);
}
[[gnu::always_inline]] inline void take_halves(const std::uint8_t* bytes, PartCodes& codes) {
  PartWords words;
  take_halves(bytes, words);
  std::memcpy(codes.bytes, &words, sizeof words);
}
[[gnu::always_inline]] inline void add_fifth(const std::uint8_t* bits, PartCodes& codes) {
  PartWords words;
  std::memcpy(&words, codes.bytes, sizeof words);
  add_fifth(bits, words);
  std::memcpy(codes.bytes, &words, sizeof words);
}

// Where a scale or a minimum is not finite: every NaN becomes the same.
template <class V, class T>
[[gnu::noinline]] void decode_nonfinite(const std::uint8_t* codes, std::size_t count, int zero,
                                        float scale, float minimum, T* out) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto code = static_cast<std::int8_t>(codes[i]);
    const float x = static_cast<float>(code - zero) * scale - minimum;
    out[i] = from_float<T>(x != x ? std::bit_cast<float>(0x7fc00000u) : x);
  }
}

// `kCount` signed codes, one finite scale.
template <std::size_t kCount, class V, class T>
[[gnu::always_inline]] inline void store_codes(const std::uint8_t* codes, int zero, float scale,
                                               T* out) {
  constexpr std::size_t lanes = V::template kLanes<T>;
  if constexpr (lanes > kCount) {
    store_codes<kCount, typename V::Narrow>(codes, zero, scale, out);
  } else {
    for (std::size_t i = 0; i < kCount; i += lanes)
      V::template store<T>(out + i, V::template scaled_int8<T>(codes + i, 0, zero, scale));
  }
}

template <std::size_t kCount, class V, class T>
[[gnu::always_inline]] inline void decode_codes(const std::uint8_t* codes, int zero, float scale,
                                                T* out) {
  if (!(scale - scale == 0.0f)) [[unlikely]]
    return decode_nonfinite<V>(codes, kCount, zero, scale, 0.0f, out);
  store_codes<kCount, V>(codes, zero, scale, out);
}

// A part with two scales, of sixteen elements each.
template <class V, class T>
[[gnu::always_inline]] inline void decode_two(const PartCodes& codes, int zero, float first,
                                              float second, T* out) {
  if constexpr (V::template kLanes<T> == kPart) {
    if (first - first == 0.0f && second - second == 0.0f) [[likely]]
      return V::template store<T>(
          out, V::template scaled_int8_pair<T>(codes.bytes, zero, first, second));
  }
  decode_codes<kPart / 2, V>(codes.bytes, zero, first, out);
  decode_codes<kPart / 2, V>(codes.bytes + kPart / 2, zero, second, out + kPart / 2);
}

// A part whose elements have a minimum.
template <class V, class T>
[[gnu::always_inline]] inline void decode_codes_less(const PartCodes& codes, float scale,
                                                     float minimum, T* out) {
  constexpr std::size_t lanes = V::template kLanes<T>;
  if (!(scale - scale == 0.0f && minimum - minimum == 0.0f)) [[unlikely]]
    return decode_nonfinite<V>(codes.bytes, kPart, 0, scale, minimum, out);
  for (std::size_t i = 0; i < kPart; i += lanes)
    V::template store<T>(out + i, V::template scaled_int8_less<T>(codes.bytes + i, scale, minimum));
}

template <class F, class V, class T>
[[gnu::always_inline]] inline void decode_interleaved(const PackedView& weight, std::size_t row,
                                                      std::size_t begin, std::size_t end, T* out) {
  const std::uint8_t* values = weight.row_values(row);
  alignas(64) T whole[kPart];
  while (begin < end) {
    const std::uint8_t* block = values + begin / F::kBlock * F::kBytes;
    const std::size_t skip = begin % kPart;
    const std::size_t count = end - begin < kPart - skip ? end - begin : kPart - skip;
    F::template decode_part<V>(block, begin % F::kBlock / kPart, count == kPart ? out : whole);
    if (count != kPart) std::memcpy(out, whole + skip, count * sizeof(T));
    out += count;
    begin += count;
  }
}

}  // namespace monograph
