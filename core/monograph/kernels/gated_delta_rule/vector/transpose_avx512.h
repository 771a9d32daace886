#pragma once

#include "monograph/kernels/gated_delta_rule/vector/product.h"
#include "monograph/simd/transpose_avx512.h"

namespace monograph {

template <>
struct DeltaTranspose<simd::Avx512> {
  [[gnu::noinline]] static void run(const float* in, std::int64_t ldi, std::int64_t rows,
                                    std::int64_t columns, float* out, std::int64_t ldo) {
    for (std::int64_t r = 0; r < rows; r += 16)
      for (std::int64_t c = 0; c < columns; c += 16) {
        __m512i v[16];
        transpose_16x16(reinterpret_cast<const std::uint32_t*>(in + r * ldi + c), ldi, v);
        unrolled<16>([&](auto i) __attribute__((always_inline)) {
          _mm512_storeu_si512(out + (c + static_cast<std::int64_t>(i())) * ldo + r, v[i]);
        });
      }
  }
};

}  // namespace monograph
