// Rows of a weight as floats in the first-level cache, each vector in places (few_decode.h): how
// products read the formats that are decoded_by_rows(). A decoder is instantiated once for an order
// and a rounding, whatever the number of rows that are multiplied and the pass; the stores and
// loads run beside the arithmetic of decoding, which the vector units limit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "monograph/kernels/linear/few_decode.h"
#include "monograph/kernels/linear/generic.h"

namespace monograph {

// `count` elements from `begin` on of `rows` rows, rounded to the type of the activations, as
// floats in places, rows `stride` apart and padded with zeros to whole vectors.
using PlacedRowsFn = void(const LinearWeight&, DType, std::size_t first, std::size_t rows,
                          std::size_t begin, std::size_t count, float* out, std::size_t stride);

// Of a format's own decoder, specialised for each order: what vocabularies give the formats that
// have one here.
//   rounded<kBf16>(x, type)    to bf16, or to fp16 or fp32 as `type` says; a NaN has nothing in its
//                              low 16 bits
//   part<kBf16>(codes, first, second, type, out)   32 signed codes, an Affine for each sixteen
//   bytes<kBf16>(p, flip, zero, scale, type, out)  a vector of (byte ^ flip) - zero times scale
//   eight_times(bytes, d, out), eight_signed_times(p, d, out)   eight bytes as floats, times d
//   look_up(bytes, codes)      each of 32 codes becomes one of sixteen bytes
template <class Order>
struct PlacedParts;

// What AVX-512 has besides.
template <class Parts>
inline constexpr bool kHasTables = requires {
  Parts::nibbles;
};
template <class Parts>
inline constexpr bool kTakesTopBytes = requires {
  Parts::kLeastScale;
};

// code * scale - minimum, the exact number rounded once.
struct Affine {
  float scale, minimum;
};

// Any weight, by way of memory.
template <class F, class Order>
[[gnu::noinline]] void placed_any(const LinearWeight& weight, DType dtype, std::size_t first,
                                  std::size_t rows, std::size_t begin, std::size_t count,
                                  float* out, std::size_t stride) {
  using L = typename Order::L;
  with_type(
      dtype, [&]<class T>() __attribute__((always_inline)) {
        decode_rows<F, typename Order::V, T>(weight, first, rows, begin, count, out, stride);
      });
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t k = 0; k < count; k += L::kLanes) {
      float* const at = out + r * stride + k;
      L::store(at, Order::to_places(L::load(at)));
    }
}

// Every NaN has nothing in its low 16 bits.
template <class V>
[[gnu::always_inline]] inline float plain_half(const std::uint8_t* p) {
  const float x = V::half_at(p);
  if ((p[1] & 0x7c) == 0x7c) [[unlikely]]
    return x != x ? std::bit_cast<float>(0x7fc00000u) : x;
  return x;
}

// Into the second-level cache: the first one has the left operand and the floats.
[[gnu::always_inline]] inline void prefetch_far(const std::uint8_t* p) {
  __builtin_prefetch(p, 0, 2);
}

}  // namespace monograph
