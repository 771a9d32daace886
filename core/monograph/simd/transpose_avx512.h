// Blocks of words, rows to columns.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "monograph/simd/unrolled.h"

namespace monograph {

// 16 x 16 words of 32 bits, in place: 64 shuffles.
[[gnu::always_inline]] inline void transpose_16x16(__m512i (&v)[16]) {
  __m512i t[16];
  unrolled<8>([&](auto j) __attribute__((always_inline)) {
    constexpr std::size_t i = 2 * j;
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  });
  unrolled<4>([&](auto j) __attribute__((always_inline)) {
    constexpr std::size_t i = 4 * j;
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  });
  unrolled<4>([&](auto i) __attribute__((always_inline)) {
    t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
    t[i + 8] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
    t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
  });
  unrolled<4>([&](auto i) __attribute__((always_inline)) {
    v[i] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88);
    v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
    v[i + 4] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
    v[i + 12] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
  });
}

// The same of sixteen rows in memory, at in + i * stride (in words). The 4 x 4 blocks move in the
// loads (masked broadcasts of 16 bytes), which leaves 32 shuffles instead of 64.
[[gnu::always_inline]] inline void transpose_16x16(const std::uint32_t* in, std::ptrdiff_t stride,
                                                   __m512i out[16]) {
  __m512i t[16];
  const auto quad = [&](std::ptrdiff_t row, std::ptrdiff_t column) __attribute__((always_inline)) {
    const std::uint32_t* p = in + row * stride + column;
    const auto at = [&](std::ptrdiff_t i) __attribute__((always_inline)) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 4 * i * stride));
    };
    __m512i v = _mm512_castsi128_si512(at(0));
    v = _mm512_mask_broadcast_i32x4(v, 0x00f0, at(1));
    v = _mm512_mask_broadcast_i32x4(v, 0x0f00, at(2));
    return _mm512_mask_broadcast_i32x4(v, 0xf000, at(3));
  };
  for (int c = 0; c < 4; ++c) {
    const __m512i r0 = quad(0, 4 * c), r1 = quad(1, 4 * c);
    const __m512i r2 = quad(2, 4 * c), r3 = quad(3, 4 * c);
    t[0] = _mm512_unpacklo_epi32(r0, r1);
    t[1] = _mm512_unpackhi_epi32(r0, r1);
    t[2] = _mm512_unpacklo_epi32(r2, r3);
    t[3] = _mm512_unpackhi_epi32(r2, r3);
    out[4 * c] = _mm512_unpacklo_epi64(t[0], t[2]);
    out[4 * c + 1] = _mm512_unpackhi_epi64(t[0], t[2]);
    out[4 * c + 2] = _mm512_unpacklo_epi64(t[1], t[3]);
    out[4 * c + 3] = _mm512_unpackhi_epi64(t[1], t[3]);
  }
}

}  // namespace monograph
