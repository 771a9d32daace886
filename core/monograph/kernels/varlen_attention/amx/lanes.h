// fp32 arithmetic on sixteen lanes for the matrix variant. Included by amx.cpp only.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "monograph/kernels/varlen_attention/softmax.h"

namespace monograph {
namespace {

// 2^x, relative error 2.9e-6 (bf16 rounds at 2e-3), 2^0 = 1 exactly, 2^-inf = 0; NaN stays. VREDUCE
// gives the fraction and VSCALEF takes the floor of x itself: 10 instructions.
[[gnu::always_inline]] inline __m512 exp2_lanes(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(0x1.b7f74p-7f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.abf862p-5f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ee2452p-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62d6c6p-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(p, x);
}

// tanh(x) = 1 - 2 / (1 + 2^(2 x log2 e)); absolute error about 2e-6.
[[gnu::always_inline]] inline __m512 tanh_lanes(__m512 x) {
  const __m512 e = exp2_lanes(_mm512_mul_ps(x, _mm512_set1_ps(2 * kLog2E)));
  const __m512 one = _mm512_set1_ps(1.f);
  return _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.f), _mm512_add_ps(one, e)));
}

// Lane i of the result is op over the lanes of v[i]: 45 instructions for sixteen rows.
template <class Op>
[[gnu::always_inline]] inline __m512 across(const __m512 v[16], Op op) {
  __m512 b[8], c[4];
  for (int i = 0; i < 8; ++i)
    b[i] =
        op(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; ++i) {
    const __m512d x = _mm512_castps_pd(b[2 * i]), y = _mm512_castps_pd(b[2 * i + 1]);
    c[i] =
        op(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  const __m512 d0 =
      op(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
  const __m512 d1 =
      op(_mm512_shuffle_f32x4(c[2], c[3], 0x88), _mm512_shuffle_f32x4(c[2], c[3], 0xdd));
  return op(_mm512_shuffle_f32x4(d0, d1, 0x88), _mm512_shuffle_f32x4(d0, d1, 0xdd));
}

struct Max {
  [[gnu::always_inline]] __m512 operator()(__m512 a, __m512 b) const { return _mm512_max_ps(a, b); }
};
struct Add {
  [[gnu::always_inline]] __m512 operator()(__m512 a, __m512 b) const { return _mm512_add_ps(a, b); }
};

// Lanes i with begin <= i < end.
[[gnu::always_inline]] inline __mmask16 lanes_between(std::int64_t begin, std::int64_t end) {
  const auto below = [](std::int64_t n) __attribute__((always_inline)) {
    return n <= 0 ? 0u : n >= 16 ? 0xffffu : (1u << n) - 1;
  };
  return static_cast<__mmask16>(below(end) & ~below(begin));
}

}  // namespace
}  // namespace monograph
