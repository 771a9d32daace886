// From fp32 to 16-bit floats on AVX-512, and from integers: a part of the vocabulary of avx512.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "monograph/base/float_types.h"

namespace monograph::simd {

struct Avx512Conversions {
  // Round to nearest even in integers: VCVTNE*PS2BF16 would flush subnormals. NaN becomes 0x7fc0.
  [[gnu::always_inline]] static __m256i to_bf16(__m512 x) {
    const __m512i u = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i rounded = _mm512_srli_epi32(sum, 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
  }

  [[gnu::always_inline]] static __m256i to_fp16(__m512 x) {
    return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }

  // Thirty-two fp32 numbers, none of them NaN, to bf16.
  [[gnu::always_inline]] static __m512i to_bf16(__m512 low, __m512 high) {
    const auto rounded = [](__m512 x) __attribute__((always_inline)) {
      const __m512i u = _mm512_castps_si512(x);
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
      return _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    };
    alignas(64) static constexpr std::uint16_t kUpper[32] = {
        1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
        33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    return _mm512_permutex2var_epi16(rounded(low), _mm512_load_si512(kUpper), rounded(high));
  }

  [[gnu::always_inline]] static __m512 int8_times(const std::uint8_t* codes, std::uint8_t flip,
                                                  int zero, float scale) {
    const __m128i bytes = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)),
                                        _mm_set1_epi8(static_cast<char>(flip)));
    const __m512i differences =
        _mm512_sub_epi32(_mm512_cvtepi8_epi32(bytes), _mm512_set1_epi32(zero));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(differences), _mm512_set1_ps(scale));
  }
  // Products with a finite scale are no NaN.
  template <class T>
  [[gnu::always_inline]] static auto scaled_int8(const std::uint8_t* codes, std::uint8_t flip,
                                                 int zero, float scale) {
    if constexpr (sizeof(T) == 4) {
      return int8_times(codes, flip, zero, scale);
    } else {
      const __m512 low = int8_times(codes, flip, zero, scale);
      const __m512 high = int8_times(codes + 16, flip, zero, scale);
      if constexpr (std::is_same_v<T, Bf16>)
        if (scale - scale == 0.0f) [[likely]]
          return to_bf16(low, high);
      const __m256i a = std::is_same_v<T, Bf16> ? to_bf16(low) : to_fp16(low);
      const __m256i b = std::is_same_v<T, Bf16> ? to_bf16(high) : to_fp16(high);
      return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
    }
  }

  // Sixteen with one scale, sixteen with the other; both are finite.
  template <class T>
  [[gnu::always_inline]] static auto scaled_int8_pair(const std::uint8_t* codes, int zero,
                                                      float first, float second) {
    const __m512 low = int8_times(codes, 0, zero, first);
    const __m512 high = int8_times(codes + 16, 0, zero, second);
    if constexpr (std::is_same_v<T, Bf16>)
      return to_bf16(low, high);
    else
      return _mm512_inserti64x4(_mm512_castsi256_si512(to_fp16(low)), to_fp16(high), 1);
  }

  template <class T>
  [[gnu::always_inline]] static auto scaled_int8_less(const std::uint8_t* codes, float scale,
                                                      float minimum) {
    const __m512 less = _mm512_set1_ps(minimum);
    const __m512 low = _mm512_sub_ps(int8_times(codes, 0, 0, scale), less);
    if constexpr (sizeof(T) == 4) {
      return low;
    } else {
      const __m512 high = _mm512_sub_ps(int8_times(codes + 16, 0, 0, scale), less);
      if constexpr (std::is_same_v<T, Bf16>)
        return to_bf16(low, high);
      else
        return _mm512_inserti64x4(_mm512_castsi256_si512(to_fp16(low)), to_fp16(high), 1);
    }
  }

  // The fp16 number at any address.
  [[gnu::always_inline]] static float half_at(const std::uint8_t* p) {
    std::uint16_t bits;
    std::memcpy(&bits, p, sizeof bits);
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
  }

  [[gnu::always_inline]] static void lookup_bytes(const std::uint8_t (&table)[16],
                                                  std::uint8_t* codes) {
    const __m256i both =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    auto* const place = reinterpret_cast<__m256i*>(codes);
    _mm256_storeu_si256(place, _mm256_shuffle_epi8(both, _mm256_loadu_si256(place)));
  }
};

}  // namespace monograph::simd
