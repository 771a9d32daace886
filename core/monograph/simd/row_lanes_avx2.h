#pragma once

#include "monograph/simd/lanes_avx2.h"
#include "monograph/simd/row_lanes.h"

namespace monograph {

template <>
struct RowLanes<simd::Avx2> : Lanes<simd::Avx2> {
  [[gnu::always_inline]] static F32 fused(F32 a, F32 b, F32 c) { return fma(a, b, c); }
  [[gnu::always_inline]] static F32 sqrt(F32 x) { return _mm256_sqrt_ps(x); }
  struct Doubles {
    __m256d low, high;
  };
  [[gnu::always_inline]] static void add_squares(Doubles& sum, F32 x) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    sum.low = _mm256_fmadd_pd(low, low, sum.low);
    sum.high = _mm256_fmadd_pd(high, high, sum.high);
  }
  [[gnu::always_inline]] static void store_doubles(double* p, const Doubles& x) {
    _mm256_storeu_pd(p, x.low);
    _mm256_storeu_pd(p + 4, x.high);
  }
  template <class T>
  [[gnu::always_inline]] static F32 round_as(F32 x) {
    if constexpr (std::is_same_v<T, Bf16>) {
      const __m256i u = _mm256_castps_si256(x);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
      const __m256i sum = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
      const __m256i rounded = _mm256_and_si256(sum, _mm256_set1_epi32(-65536));
      const F32 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
      return _mm256_blendv_ps(_mm256_castsi256_ps(rounded), nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    } else if constexpr (std::is_same_v<T, Fp16>)
      return _mm256_cvtph_ps(simd::Avx2::to_fp16(x));
    else
      return x;
  }
  template <class T>
  [[gnu::always_inline]] static void store_two(T* p, F32 a, F32 b) {
    if constexpr (kSplits<T>) {
      const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(round_as<T>(a)), 16);
      const __m256i both = _mm256_or_si256(low, _mm256_castps_si256(round_as<T>(b)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), both);
    } else {
      store_as(p, a);
      store_as(p + kLanes, b);
    }
  }
  template <class T>
  [[gnu::always_inline]] static void store_rounded(T* p, F32 x) {
    store_as(p, x);
  }
  template <class T>
  [[gnu::always_inline]] static void ordered_as(F32& a, F32& b) {
    if constexpr (kSplits<T>) {
      const __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0x88));
      const __m256d odd = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0xdd));
      a = _mm256_castpd_ps(_mm256_permute4x64_pd(even, 0xd8));
      b = _mm256_castpd_ps(_mm256_permute4x64_pd(odd, 0xd8));
    }
  }
};

}  // namespace monograph
