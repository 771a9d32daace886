#pragma once

#include "monograph/simd/lanes_neon.h"
#include "monograph/simd/row_lanes.h"

namespace monograph {

template <>
struct RowLanes<simd::Neon> : Lanes<simd::Neon> {
  [[gnu::always_inline]] static F32 fused(F32 a, F32 b, F32 c) { return fma(a, b, c); }
  [[gnu::always_inline]] static F32 sqrt(F32 x) { return {vsqrtq_f32(x.low), vsqrtq_f32(x.high)}; }
  struct Doubles {
    float64x2_t two[4] = {vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0)};
  };
  [[gnu::always_inline]] static void add_squares(Doubles& sum, F32 x) {
    add_square(sum.two[0], vcvt_f64_f32(vget_low_f32(x.low)));
    add_square(sum.two[1], vcvt_high_f64_f32(x.low));
    add_square(sum.two[2], vcvt_f64_f32(vget_low_f32(x.high)));
    add_square(sum.two[3], vcvt_high_f64_f32(x.high));
  }
  [[gnu::always_inline]] static void store_doubles(double* p, const Doubles& x) {
    for (int i = 0; i < 4; ++i) vst1q_f64(p + 2 * i, x.two[i]);
  }
  template <class T>
  [[gnu::always_inline]] static F32 round_as(F32 x) {
    if constexpr (std::is_same_v<T, Bf16>)
      return simd::Neon::from_bf16(simd::Neon::to_halves<T>(x));
    else if constexpr (std::is_same_v<T, Fp16>)
      return simd::Neon::from_fp16(simd::Neon::to_halves<T>(x));
    else
      return x;
  }
  template <class T>
  [[gnu::always_inline]] static void store_two(T* p, F32 a, F32 b) {
    store_as(p, a);
    store_as(p + kLanes, b);
  }
  template <class T>
  [[gnu::always_inline]] static void store_rounded(T* p, F32 x) {
    store_as(p, x);
  }
  template <class T>
  [[gnu::always_inline]] static void ordered_as(F32&, F32&) {}

 private:
  [[gnu::always_inline]] static void add_square(float64x2_t& sum, float64x2_t x) {
    sum = vfmaq_f64(sum, x, x);
  }
};

}  // namespace monograph
