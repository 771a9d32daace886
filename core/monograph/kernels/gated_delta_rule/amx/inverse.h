// The inverse of a unit lower triangle in fp32, by blocks of 16. Included by amx.cpp only.
#pragma once

#include <immintrin.h>

#include "monograph/kernels/gated_delta_rule/vector/chunk.h"

namespace monograph {
namespace {

// x[i] += factors[i][j] y[j] over j < depth; rows of `factors` and `y` are kPairStride apart.
[[gnu::always_inline]] inline void add_rows(const float* factors, const float* y,
                                            std::int64_t depth, __m512 (&x)[16]) {
  for (std::int64_t j = 0; j < depth; ++j) {
    const __m512 row = _mm512_load_ps(y + j * kPairStride);
    unrolled<16>([&](auto i) __attribute__((always_inline)) {
      const float f = factors[static_cast<std::int64_t>(i()) * kPairStride + j];
      x[i] = _mm512_fmadd_ps(_mm512_set1_ps(f), row, x[i]);
    });
  }
}

// out = (I - l)^-1 for a strictly lower l; rows of both are kPairStride apart, `rows` a multiple of
// 16. Columns beyond the 16 that hold the diagonal are not written. A row's own block is solved by
// substitution: a series for it would lose all digits where keys are alike.
[[gnu::noinline]] void invert_lower(const float* l, std::int64_t rows, float* out) {
  for (std::int64_t b = 0; b < rows; b += 16) {
    const float* const own = l + b * kPairStride + b;
    __m512 x[16];
    unrolled<16>([&](auto i) __attribute__((always_inline)) {
      x[i] = _mm512_maskz_mov_ps(static_cast<__mmask16>(1u << i()), _mm512_set1_ps(1.f));
    });
    unrolled<15>([&](auto j) __attribute__((always_inline)) {
      unrolled<16>([&](auto i) __attribute__((always_inline)) {
        if constexpr (i() > j()) {
          const float f =
              own[static_cast<std::int64_t>(i()) * kPairStride + static_cast<std::int64_t>(j())];
          x[i] = _mm512_fmadd_ps(_mm512_set1_ps(f), x[j], x[i]);
        }
      });
    });
    float* const to = out + b * kPairStride;
    unrolled<16>([&](auto i) __attribute__((always_inline)) {
      _mm512_store_ps(to + static_cast<std::int64_t>(i()) * kPairStride + b, x[i]);
    });
    alignas(64) float sum[16 * kPairStride];
    for (std::int64_t c = 0; c < b; c += 16) {
      __m512 y[16];
      unrolled<16>([&](auto i) __attribute__((always_inline)) { y[i] = _mm512_setzero_ps(); });
      add_rows(l + b * kPairStride + c, out + c * kPairStride + c, b - c, y);
      unrolled<16>([&](auto i) __attribute__((always_inline)) {
        _mm512_store_ps(sum + static_cast<std::int64_t>(i()) * kPairStride, y[i]);
        y[i] = _mm512_setzero_ps();
      });
      add_rows(to + b, sum, 16, y);
      unrolled<16>([&](auto i) __attribute__((always_inline)) {
        _mm512_store_ps(to + static_cast<std::int64_t>(i()) * kPairStride + c, y[i]);
      });
    }
  }
}

}  // namespace
}  // namespace monograph
