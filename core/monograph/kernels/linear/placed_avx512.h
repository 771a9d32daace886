// Parts of rows as vectors of sixteen floats in places.
#pragma once

#include "monograph/kernels/linear/few_decode_avx512.h"
#include "monograph/kernels/linear/placed_bytes_avx2.h"

namespace monograph {

template <>
struct PlacedParts<FewOrder<simd::Avx512>> : PlacedBytesAvx2 {
  using Order = FewOrder<simd::Avx512>;

  template <bool kBf16>
  [[gnu::always_inline]] static __m512 rounded(__m512 x, DType dtype) {
    if constexpr (kBf16) return Order::rounded_plain_nan(x);
    return dtype == DType::kFloat16 ? _mm512_cvtph_ps(simd::Avx512::to_fp16(x)) : x;
  }
  // Element i in byte 2 i, element 8 + i in byte 2 i + 1.
  [[gnu::always_inline]] static __m128i order() {
    return _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
  }

  template <bool kBf16>
  [[gnu::always_inline]] static void part(const PartWords& codes, Affine first, Affine second,
                                          DType dtype, float* out) {
    const __m256i ordered =
        _mm256_shuffle_epi8(reinterpret_cast<__m256i>(codes), _mm256_broadcastsi128_si256(order()));
    const auto half = [&](__m128i bytes, Affine affine, float* to) __attribute__((always_inline)) {
      const __m512 numbers = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
      const __m512 x =
          _mm512_fmsub_ps(numbers, _mm512_set1_ps(affine.scale), _mm512_set1_ps(affine.minimum));
      _mm512_storeu_ps(to, rounded<kBf16>(x, dtype));
    };
    half(_mm256_castsi256_si128(ordered), first, out);
    half(_mm256_extracti128_si256(ordered, 1), second, out + 16);
  }

  template <bool kBf16>
  [[gnu::always_inline]] static void bytes(const std::uint8_t* p, std::uint8_t flip, int zero,
                                           float scale, DType dtype, float* out) {
    const __m128i signed_bytes = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)),
                                               _mm_set1_epi8(static_cast<char>(flip)));
    const __m512i differences = _mm512_sub_epi32(
        _mm512_cvtepi8_epi32(_mm_shuffle_epi8(signed_bytes, order())), _mm512_set1_epi32(zero));
    _mm512_storeu_ps(
        out, rounded<kBf16>(_mm512_mul_ps(_mm512_cvtepi32_ps(differences), _mm512_set1_ps(scale)),
                            dtype));
  }

  // Signed bytes times a scale. A shuffle puts a byte at the top of its lane, where it needs no
  // extension; the scale is 2^-24 of itself, exact where it is 0 or not below kLeastScale.
  static constexpr float kLeastScale = 0x1p-100f;
  [[gnu::always_inline]] static __m512 lowered(float scale) {
    return _mm512_set1_ps(scale * 0x1p-24f);
  }
  [[gnu::always_inline]] static __m512 lowered_half(const std::uint8_t* p) {
    if ((p[1] & 0x7c) == 0x7c) [[unlikely]]
      return lowered(plain_half<simd::Avx512>(p));
    std::int16_t bits;
    std::memcpy(&bits, p, sizeof bits);
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_set1_epi16(bits)), _mm512_set1_ps(0x1p-24f));
  }
  template <bool kBf16>
  [[gnu::always_inline]] static void top_bytes(const std::uint8_t* p, __m512 scale, DType dtype,
                                               float* out) {
    constexpr int kZeros = 0x00808080;
    const __m512i tops =
        _mm512_setr_epi32(kZeros, 8 << 24 | kZeros, 1 << 24 | kZeros, 9 << 24 | kZeros,
                          2 << 24 | kZeros, 10 << 24 | kZeros, 3 << 24 | kZeros, 11 << 24 | kZeros,
                          4 << 24 | kZeros, 12 << 24 | kZeros, 5 << 24 | kZeros, 13 << 24 | kZeros,
                          6 << 24 | kZeros, 14 << 24 | kZeros, 7 << 24 | kZeros, 15 << 24 | kZeros);
    const __m512i sixteen =
        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m512 numbers = _mm512_cvtepi32_ps(_mm512_shuffle_epi8(sixteen, tops));
    _mm512_storeu_ps(out, rounded<kBf16>(_mm512_mul_ps(numbers, scale), dtype));
  }

  // The sixteen values of four bits, rounded once for all elements that share them.
  template <bool kBf16>
  [[gnu::always_inline]] static __m512 table(const float (&values)[16], Affine affine,
                                             DType dtype) {
    return rounded<kBf16>(_mm512_fmsub_ps(_mm512_loadu_ps(values), _mm512_set1_ps(affine.scale),
                                          _mm512_set1_ps(affine.minimum)),
                          dtype);
  }
  // Sixteen bytes: the lower nibbles of all, and the upper ones. A permute reads four bits.
  [[gnu::always_inline]] static void nibbles(const std::uint8_t* p, __m512 low_table,
                                             __m512 high_table, float* low, float* high) {
    const __m512i places = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    const __m512i sixteen =
        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m512i codes = _mm512_shuffle_epi8(sixteen, places);
    _mm512_storeu_ps(low, _mm512_permutexvar_ps(codes, low_table));
    _mm512_storeu_ps(high, _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), high_table));
  }
};

}  // namespace monograph
