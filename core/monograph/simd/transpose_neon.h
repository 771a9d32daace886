// Blocks of words, rows to columns.
#pragma once

#include "monograph/simd/lanes_neon.h"
#include "monograph/simd/unrolled.h"

namespace monograph {

// 4 x 4 floats, in place.
[[gnu::always_inline]] inline void transpose_4x4(float32x4_t& a, float32x4_t& b, float32x4_t& c,
                                                 float32x4_t& d) {
  const auto pairs = [](float32x4_t x) __attribute__((always_inline)) {
    return vreinterpretq_f64_f32(x);
  };
  const auto floats = [](float64x2_t x) __attribute__((always_inline)) {
    return vreinterpretq_f32_f64(x);
  };
  const float64x2_t ab = pairs(vtrn1q_f32(a, b)), ab_odd = pairs(vtrn2q_f32(a, b));
  const float64x2_t cd = pairs(vtrn1q_f32(c, d)), cd_odd = pairs(vtrn2q_f32(c, d));
  a = floats(vzip1q_f64(ab, cd));
  b = floats(vzip1q_f64(ab_odd, cd_odd));
  c = floats(vzip2q_f64(ab, cd));
  d = floats(vzip2q_f64(ab_odd, cd_odd));
}

// 8 x 8 floats, in place: the quarters, then the two off the diagonal change places.
[[gnu::always_inline]] inline void transpose_8x8(simd::Neon::Floats (&v)[8]) {
  transpose_4x4(v[0].low, v[1].low, v[2].low, v[3].low);
  transpose_4x4(v[0].high, v[1].high, v[2].high, v[3].high);
  transpose_4x4(v[4].low, v[5].low, v[6].low, v[7].low);
  transpose_4x4(v[4].high, v[5].high, v[6].high, v[7].high);
  unrolled<4>([&](auto i) __attribute__((always_inline)) {
    const float32x4_t upper = v[i].high;
    v[i].high = v[i + 4].low;
    v[i + 4].low = upper;
  });
}

}  // namespace monograph
