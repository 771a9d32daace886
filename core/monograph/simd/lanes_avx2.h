// Eight lanes.
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "monograph/simd/avx2.h"
#include "monograph/simd/lanes.h"

namespace monograph {

template <>
struct Lanes<simd::Avx2> {
  static constexpr std::int64_t kLanes = 8;
  using F32 = __m256;

  [[gnu::always_inline]] static F32 set(float x) { return _mm256_set1_ps(x); }
  [[gnu::always_inline]] static F32 load(const float* p) { return _mm256_loadu_ps(p); }
  [[gnu::always_inline]] static void store(float* p, F32 x) { _mm256_storeu_ps(p, x); }
  [[gnu::always_inline]] static F32 add(F32 a, F32 b) { return _mm256_add_ps(a, b); }
  [[gnu::always_inline]] static F32 sub(F32 a, F32 b) { return _mm256_sub_ps(a, b); }
  [[gnu::always_inline]] static F32 mul(F32 a, F32 b) { return _mm256_mul_ps(a, b); }
  [[gnu::always_inline]] static F32 div(F32 a, F32 b) { return _mm256_div_ps(a, b); }
  [[gnu::always_inline]] static F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
  [[gnu::always_inline]] static F32 max(F32 a, F32 b) { return _mm256_max_ps(a, b); }
  [[gnu::always_inline]] static F32 min(F32 a, F32 b) { return _mm256_min_ps(a, b); }
  [[gnu::always_inline]] static F32 round(F32 a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // Two factors: one exponent field reaches no further than 2^-126.
  [[gnu::always_inline]] static F32 scale2(F32 a, F32 n) {
    const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
    return mul(mul(a, power(half)), power(_mm256_sub_epi32(whole, half)));
  }
  [[gnu::always_inline]] static float reduce_add(F32 a) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  [[gnu::always_inline]] static float reduce_max(F32 a) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }

  // Four sums over the lanes, each by the same tree.
  [[gnu::always_inline]] static void sum4(const F32 (&v)[4], float* out) {
    const F32 a = add(_mm256_unpacklo_ps(v[0], v[1]), _mm256_unpackhi_ps(v[0], v[1]));
    const F32 b = add(_mm256_unpacklo_ps(v[2], v[3]), _mm256_unpackhi_ps(v[2], v[3]));
    const __m256d da = _mm256_castps_pd(a), db = _mm256_castps_pd(b);
    const F32 two = add(_mm256_castpd_ps(_mm256_unpacklo_pd(da, db)),
                        _mm256_castpd_ps(_mm256_unpackhi_pd(da, db)));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
  }

  template <class T>
  [[gnu::always_inline]] static F32 load_as(const T* p) {
    return simd::Avx2::load_f32(p);
  }
  template <class T>
  static constexpr bool kSplits = std::is_same_v<T, Bf16>;
  template <class T>
  [[gnu::always_inline]] static void load_two(const T* p, F32& a, F32& b) {
    if constexpr (kSplits<T>) {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
      a = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
      b = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(-65536)));
    } else {
      a = load_as(p);
      b = load_as(p + kLanes);
    }
  }
  template <class T>
  [[gnu::always_inline]] static void store_as(T* p, F32 x) {
    if constexpr (sizeof(T) == 4)
      _mm256_storeu_ps(p, x);
    else
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                       std::is_same_v<T, Bf16> ? simd::Avx2::to_bf16(x) : simd::Avx2::to_fp16(x));
  }

 private:
  [[gnu::always_inline]] static F32 power(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  }
};

}  // namespace monograph
