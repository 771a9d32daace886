// Sixteen tokens of a head to columns by shuffles. Included by avx512.cpp only.
#pragma once

#include "monograph/kernels/varlen_attention/vector/rows.h"
#include "monograph/simd/lanes_avx512.h"
#include "monograph/simd/transpose_avx512.h"

namespace monograph {

template <class T>
struct TransposeTokens<simd::Avx512, T> {
  static constexpr std::int64_t kTokens = 16, kElements = 16;
  static bool takes(std::ptrdiff_t) { return true; }

  [[gnu::always_inline]] static void run(const T* in, std::ptrdiff_t stride, float* out,
                                         std::int64_t columns) {
    __m512i v[16];
    unrolled<16>([&](auto i) __attribute__((always_inline)) {
      const T* const row = in + static_cast<std::ptrdiff_t>(i()) * stride;
      v[i] = _mm512_castps_si512(Lanes<simd::Avx512>::load_as(row));
    });
    transpose_16x16(v);
    unrolled<16>([&](auto i) __attribute__((always_inline)) {
      _mm512_storeu_si512(out + static_cast<std::int64_t>(i()) * columns, v[i]);
    });
  }
};

// bf16: pairs of elements move as words of 32 bits, a quarter of the shuffles.
template <>
struct TransposeTokens<simd::Avx512, Bf16> {
  static constexpr std::int64_t kTokens = 16, kElements = 32;
  static bool takes(std::ptrdiff_t stride) { return stride % 2 == 0; }

  [[gnu::always_inline]] static void run(const Bf16* in, std::ptrdiff_t stride, float* out,
                                         std::int64_t columns) {
    __m512i v[16];
    transpose_16x16(reinterpret_cast<const std::uint32_t*>(in), stride / 2, v);
    unrolled<16>([&](auto i) __attribute__((always_inline)) {
      float* const at = out + 2 * static_cast<std::int64_t>(i()) * columns;
      _mm512_storeu_si512(at, _mm512_slli_epi32(v[i], 16));
      _mm512_storeu_si512(at + columns, _mm512_and_si512(v[i], _mm512_set1_epi32(-65536)));
    });
  }
};

}  // namespace monograph
