// Sixteen lanes.
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "monograph/simd/avx512.h"
#include "monograph/simd/lanes.h"

namespace monograph {

template <>
struct Lanes<simd::Avx512> {
  static constexpr std::int64_t kLanes = 16;
  using F32 = __m512;

  [[gnu::always_inline]] static F32 set(float x) { return _mm512_set1_ps(x); }
  [[gnu::always_inline]] static F32 load(const float* p) { return _mm512_loadu_ps(p); }
  [[gnu::always_inline]] static void store(float* p, F32 x) { _mm512_storeu_ps(p, x); }
  [[gnu::always_inline]] static F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
  [[gnu::always_inline]] static F32 sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
  [[gnu::always_inline]] static F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
  [[gnu::always_inline]] static F32 div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
  [[gnu::always_inline]] static F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
  [[gnu::always_inline]] static F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
  [[gnu::always_inline]] static F32 min(F32 a, F32 b) { return _mm512_min_ps(a, b); }
  [[gnu::always_inline]] static F32 round(F32 a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  [[gnu::always_inline]] static F32 scale2(F32 a, F32 n) { return _mm512_scalef_ps(a, n); }
  [[gnu::always_inline]] static float reduce_add(F32 a) { return _mm512_reduce_add_ps(a); }
  [[gnu::always_inline]] static float reduce_max(F32 a) { return _mm512_reduce_max_ps(a); }

  // Four sums over the lanes, each by the same tree.
  [[gnu::always_inline]] static void sum4(const F32 (&v)[4], float* out) {
    const F32 a = add(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    const F32 b = add(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    const __m512d da = _mm512_castps_pd(a), db = _mm512_castps_pd(b);
    const F32 four = add(_mm512_castpd_ps(_mm512_unpacklo_pd(da, db)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(da, db)));
    const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
  }

  template <class T>
  [[gnu::always_inline]] static F32 load_as(const T* p) {
    return simd::Avx512::load_f32(p);
  }
  template <class T>
  static constexpr bool kSplits = std::is_same_v<T, Bf16>;
  template <class T>
  [[gnu::always_inline]] static void load_two(const T* p, F32& a, F32& b) {
    if constexpr (kSplits<T>) {
      const __m512i bits = _mm512_loadu_si512(p);
      a = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
      b = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(-65536)));
    } else {
      a = load_as(p);
      b = load_as(p + kLanes);
    }
  }
  template <class T>
  [[gnu::always_inline]] static void store_as(T* p, F32 x) {
    if constexpr (sizeof(T) == 4)
      _mm512_storeu_ps(p, x);
    else
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), std::is_same_v<T, Bf16>
                                                             ? simd::Avx512::to_bf16(x)
                                                             : simd::Avx512::to_fp16(x));
  }
};

}  // namespace monograph
