// Channels that are rows in memory become columns: sixteen by sixteen elements at a time.
#pragma once

#include "monograph/kernels/causal_conv1d/generic.h"
#include "monograph/simd/row_lanes_avx512.h"
#include "monograph/simd/transpose_avx512.h"

namespace monograph {

template <>
struct ConvTranspose<simd::Avx512> {
  template <class T>
  [[gnu::noinline]] static void load(const T* data, std::size_t stride, std::size_t tokens,
                                     std::size_t channels, float* rows) {
    using L = RowLanes<simd::Avx512>;
    const std::size_t whole = tokens / 16 * 16, wide = channels / 16 * 16;
    for (std::size_t c = 0; c < wide; c += 16)
      for (std::size_t t = 0; t < whole; t += 16) {
        __m512i v[16];
        unrolled<16>([&](auto i) __attribute__((always_inline)) {
          v[i] = _mm512_castps_si512(L::load_as(data + (c + i) * stride + t));
        });
        transpose_16x16(v);
        unrolled<16>([&](auto i) __attribute__((always_inline)) {
          _mm512_storeu_si512(rows + (t + i) * kConvRow + c, v[i]);
        });
      }
    for (std::size_t c = 0; c < channels; ++c)
      for (std::size_t t = c < wide ? whole : 0; t < tokens; ++t)
        rows[t * kConvRow + c] = to_float(data[c * stride + t]);
  }
};

}  // namespace monograph
