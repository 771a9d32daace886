// The vocabulary that every SIMD header implements, in plain C++: two values are a vector.
#pragma once

#include <cstddef>
#include <cstdint>

#include "monograph/base/float_types.h"
#include "monograph/base/minifloat.h"
#include "monograph/base/nibbles.h"
#include "monograph/base/scaling.h"
#include "monograph/cpu/tags.h"

namespace monograph::simd {

struct Scalar {
  template <class T>
  static constexpr std::size_t kLanes = 2;
  template <class T>
  struct Vec {
    T first, second;
  };
  template <class T>
  struct Table {
    T values[16];
  };
  using Narrow = Scalar;

  // The sixteen values times `scale`, each rounded to fp32 and then to T.
  template <class T>
  [[gnu::always_inline]] static Table<T> scaled_table(const float (&values)[16], float scale) {
    Table<T> table;
    for (int i = 0; i < 16; ++i) table.values[i] = from_float<T>(values[i] * scale);
    return table;
  }

  // kLanes<T> entries by the nibbles of kLanes<T> / 2 bytes.
  template <class T, Nibbles kNibbles>
  [[gnu::always_inline]] static Vec<T> lookup(const Table<T>& table, const std::uint8_t* packed) {
    const T high = table.values[*packed >> 4], low = table.values[*packed & 15];
    if constexpr (kNibbles == Nibbles::kHighFirst)
      return {high, low};
    else
      return {low, high};
  }

  // kLanes<T> E4M3 codes times `scale`, the product rounded to fp32 and then to T.
  template <class T>
  [[gnu::always_inline]] static float e4m3_scale(float scale) {
    return scale;
  }
  template <class T>
  [[gnu::always_inline]] static Vec<T> scaled_e4m3(const std::uint8_t* codes, float scale) {
    return {from_float<T>(E4m3::decode(codes[0]) * scale),
            from_float<T>(E4m3::decode(codes[1]) * scale)};
  }

  // kLanes<T> bytes, exclusive-or `flip`, as signed codes: (code - zero) * scale, rounded to fp32
  // and then to T.
  template <class T>
  [[gnu::always_inline]] static Vec<T> scaled_int8(const std::uint8_t* codes, std::uint8_t flip,
                                                   int zero, float scale) {
    const auto one = [&](std::uint8_t byte) __attribute__((always_inline)) {
      const int code = static_cast<std::int8_t>(byte ^ flip);
      return from_float<T>(static_cast<float>(code - zero) * scale);
    };
    return {one(codes[0]), one(codes[1])};
  }

  // kLanes<T> signed codes: code * scale - minimum, both finite, rounded to fp32 and then to T.
  template <class T>
  [[gnu::always_inline]] static Vec<T> scaled_int8_less(const std::uint8_t* codes, float scale,
                                                        float minimum) {
    const auto one = [&](std::uint8_t byte) __attribute__((always_inline)) {
      return from_float<T>(static_cast<float>(static_cast<std::int8_t>(byte)) * scale - minimum);
    };
    return {one(codes[0]), one(codes[1])};
  }

  // The fp16 number at any address.
  [[gnu::always_inline]] static float half_at(const std::uint8_t* p) {
    std::uint16_t bits;
    std::memcpy(&bits, p, sizeof bits);
    return to_float(Fp16{bits});
  }

  // Thirty-two codes below sixteen become the table's bytes.
  [[gnu::always_inline]] static void lookup_bytes(const std::uint8_t (&table)[16],
                                                  std::uint8_t* codes) {
    for (int i = 0; i < 32; ++i) codes[i] = table[codes[i]];
  }

  template <class T>
  [[gnu::always_inline]] static void store(T* out, Vec<T> v) {
    out[0] = v.first;
    out[1] = v.second;
  }

  // Past the caches where the instruction set can; `out` aligned to a vector, stream_end() last.
  template <class T>
  [[gnu::always_inline]] static void stream(T* out, Vec<T> v) {
    store(out, v);
  }
  [[gnu::always_inline]] static void stream_end() {}

  // A line into the first-level cache, or into the second.
  [[gnu::always_inline]] static void prefetch(const void* p) { __builtin_prefetch(p); }
  [[gnu::always_inline]] static void prefetch_second(const void* p) { __builtin_prefetch(p, 0, 2); }

  // Bits of the largest magnitude among `count` elements. An integer maximum, so NaN is above
  // infinity is above every finite value, whatever the order.
  template <class T>
  [[gnu::always_inline]] static std::uint32_t absmax_bits(const T* in, std::size_t count) {
    std::uint32_t largest = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t a = std::bit_cast<std::uint32_t>(to_float(in[i])) & 0x7fffffff;
      largest = a > largest ? a : largest;
    }
    return largest;
  }

  // Bounds of a sixteen-value code in ascending order, and the code of each interval.
  struct Encoder {
    const float* bounds;
    const std::uint8_t* order;
  };
  [[gnu::always_inline]] static Encoder encoder(const float (&bounds)[16],
                                                const std::uint8_t (&order)[16]) {
    return {bounds, order};
  }

  // Elements one encode() takes.
  static constexpr std::size_t kEncode = 2;

  // kEncode elements times `inverse` (rounded to fp32) to kEncode / 2 bytes, high nibble first.
  template <class T>
  [[gnu::always_inline]] static void encode(const Encoder& e, const T* in, float inverse,
                                            std::uint8_t* packed) {
    *packed = static_cast<std::uint8_t>(encode_one(e, to_float(in[0]) * inverse) << 4 |
                                        encode_one(e, to_float(in[1]) * inverse));
  }

  // The code of one value already divided by the scale; a tie goes to the lower interval.
  [[gnu::always_inline]] static unsigned encode_one(const Encoder& e, float v) {
    unsigned index = 0;
    for (int i = 0; i < 15; ++i) index += v > e.bounds[i];
    return e.order[index];
  }

  // Elements one encode_as() takes.
  static constexpr std::size_t kEncodeAs = 2;

  [[gnu::always_inline]] static float scaled(float x, const Scaling& s) {
    return (s.divide ? x / s.factor : x * s.factor) + s.zero;
  }

  // kEncodeAs elements to codes of the minifloat E: one a byte, or two with the even one low.
  template <class E, class T>
  [[gnu::always_inline]] static void encode_as(const T* in, const Scaling& s, std::uint8_t* out) {
    const std::uint32_t first = E::encode(scaled(to_float(in[0]), s));
    const std::uint32_t second = E::encode(scaled(to_float(in[1]), s));
    if constexpr (E::kSignCode == 8) {
      out[0] = static_cast<std::uint8_t>(first | second << 4);
    } else {
      out[0] = static_cast<std::uint8_t>(first);
      out[1] = static_cast<std::uint8_t>(second);
    }
  }
};

}  // namespace monograph::simd
