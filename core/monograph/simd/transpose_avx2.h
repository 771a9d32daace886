// Blocks of words, rows to columns.
#pragma once

#include <immintrin.h>

#include <cstddef>

#include "monograph/simd/unrolled.h"

namespace monograph {

// 8 x 8 floats, in place: 24 shuffles.
[[gnu::always_inline]] inline void transpose_8x8(__m256 (&v)[8]) {
  __m256 t[8];
  unrolled<4>([&](auto j) __attribute__((always_inline)) {
    constexpr std::size_t i = 2 * j;
    t[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
  });
  unrolled<2>([&](auto j) __attribute__((always_inline)) {
    constexpr std::size_t i = 4 * j;
    v[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    v[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    v[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    v[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  });
  unrolled<4>([&](auto i) __attribute__((always_inline)) {
    t[i] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x31);
  });
  unrolled<8>([&](auto i) __attribute__((always_inline)) { v[i] = t[i]; });
}

}  // namespace monograph
