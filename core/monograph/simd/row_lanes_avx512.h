#pragma once

#include "monograph/simd/lanes_avx512.h"
#include "monograph/simd/row_lanes.h"

namespace monograph {

template <>
struct RowLanes<simd::Avx512> : Lanes<simd::Avx512> {
  [[gnu::always_inline]] static F32 fused(F32 a, F32 b, F32 c) { return fma(a, b, c); }
  [[gnu::always_inline]] static F32 sqrt(F32 x) { return _mm512_sqrt_ps(x); }
  struct Doubles {
    __m512d low, high;
  };
  [[gnu::always_inline]] static void add_squares(Doubles& sum, F32 x) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    sum.low = _mm512_fmadd_pd(low, low, sum.low);
    sum.high = _mm512_fmadd_pd(high, high, sum.high);
  }
  [[gnu::always_inline]] static void store_doubles(double* p, const Doubles& x) {
    _mm512_storeu_pd(p, x.low);
    _mm512_storeu_pd(p + 8, x.high);
  }
  template <class T>
  [[gnu::always_inline]] static F32 round_as(F32 x) {
    if constexpr (std::is_same_v<T, Bf16>)
      return _mm512_castsi512_ps(_mm512_and_si512(bf16_above(x), _mm512_set1_epi32(-65536)));
    else if constexpr (std::is_same_v<T, Fp16>)
      return _mm512_cvtph_ps(simd::Avx512::to_fp16(x));
    else
      return x;
  }
  template <class T>
  [[gnu::always_inline]] static void store_two(T* p, F32 a, F32 b) {
    if constexpr (kSplits<T>) {
      const __m512i low = _mm512_srli_epi32(bf16_above(a), 16);
      _mm512_storeu_si512(p, _mm512_mask_mov_epi16(low, 0xaaaaaaaa, bf16_above(b)));
    } else {
      store_as(p, a);
      store_as(p + kLanes, b);
    }
  }
  template <class T>
  [[gnu::always_inline]] static void store_rounded(T* p, F32 x) {
    if constexpr (std::is_same_v<T, Bf16>)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                          _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(x), 16)));
    else
      store_as(p, x);
  }
  template <class T>
  [[gnu::always_inline]] static void ordered_as(F32& a, F32& b) {
    if constexpr (kSplits<T>) {
      const __m512i even =
          _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
      const F32 low = a;
      a = _mm512_permutex2var_ps(low, even, b);
      b = _mm512_permutex2var_ps(low, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
    }
  }

 private:
  // The bits of bf16 in the upper half of each lane; below them anything.
  [[gnu::always_inline]] static __m512i bf16_above(F32 x) {
    const __m512i u = _mm512_castps_si512(x);
    const __mmask16 odd = _mm512_test_epi32_mask(u, _mm512_set1_epi32(0x10000));
    const __m512i half = _mm512_add_epi32(u, _mm512_set1_epi32(0x7fff));
    const __m512i sum = _mm512_mask_sub_epi32(half, odd, half, _mm512_set1_epi32(-1));
    return _mm512_mask_mov_epi32(sum, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q),
                                 _mm512_set1_epi32(0x7fc00000));
  }
};

}  // namespace monograph
