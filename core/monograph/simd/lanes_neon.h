// Eight lanes, in two registers.
#pragma once

#include <type_traits>

#include "monograph/simd/lanes.h"
#include "monograph/simd/neon.h"

namespace monograph {

template <>
struct Lanes<simd::Neon> {
  static constexpr std::int64_t kLanes = 8;
  using F32 = simd::Neon::Floats;

  [[gnu::always_inline]] static F32 set(float x) {
    const float32x4_t four = vdupq_n_f32(x);
    return {four, four};
  }
  [[gnu::always_inline]] static F32 load(const float* p) {
    return {vld1q_f32(p), vld1q_f32(p + 4)};
  }
  [[gnu::always_inline]] static void store(float* p, F32 x) {
    vst1q_f32(p, x.low);
    vst1q_f32(p + 4, x.high);
  }
  [[gnu::always_inline]] static F32 add(F32 a, F32 b) {
    return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)};
  }
  [[gnu::always_inline]] static F32 sub(F32 a, F32 b) {
    return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)};
  }
  [[gnu::always_inline]] static F32 mul(F32 a, F32 b) {
    return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)};
  }
  [[gnu::always_inline]] static F32 div(F32 a, F32 b) {
    return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)};
  }
  [[gnu::always_inline]] static F32 fma(F32 a, F32 b, F32 c) {
    return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
  }
  // b where one is NaN or both are zero, as on x86: FMAX prefers the NaN and +0.
  [[gnu::always_inline]] static F32 max(F32 a, F32 b) {
    return {max(a.low, b.low), max(a.high, b.high)};
  }
  [[gnu::always_inline]] static F32 min(F32 a, F32 b) {
    return {vbslq_f32(vcltq_f32(a.low, b.low), a.low, b.low),
            vbslq_f32(vcltq_f32(a.high, b.high), a.high, b.high)};
  }
  [[gnu::always_inline]] static F32 round(F32 a) { return {vrndnq_f32(a.low), vrndnq_f32(a.high)}; }
  // Two factors: one exponent field reaches no further than 2^-126.
  [[gnu::always_inline]] static F32 scale2(F32 a, F32 n) {
    return {scale2(a.low, n.low), scale2(a.high, n.high)};
  }
  [[gnu::always_inline]] static float reduce_add(F32 a) {
    const float32x4_t four = vaddq_f32(a.low, a.high);
    return vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
  }
  [[gnu::always_inline]] static float reduce_max(F32 a) {
    const float32x4_t four = max(a.low, a.high);
    const float32x4_t two = max(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(max(two, vextq_f32(two, two, 1)), 0);
  }

  // Four sums over the lanes, each by the same tree.
  [[gnu::always_inline]] static void sum4(const F32 (&v)[4], float* out) {
    vst1q_f32(out, vaddq_f32(sums_of_four(v[0].low, v[1].low, v[2].low, v[3].low),
                             sums_of_four(v[0].high, v[1].high, v[2].high, v[3].high)));
  }

  template <class T>
  [[gnu::always_inline]] static F32 load_as(const T* p) {
    return simd::Neon::load_f32(p);
  }
  // To widen in order is one instruction for four elements, as to part them would be.
  template <class T>
  static constexpr bool kSplits = false;
  template <class T>
  [[gnu::always_inline]] static void load_two(const T* p, F32& a, F32& b) {
    a = load_as(p);
    b = load_as(p + kLanes);
  }
  template <class T>
  [[gnu::always_inline]] static void store_as(T* p, F32 x) {
    if constexpr (sizeof(T) == 4)
      store(p, x);
    else
      vst1q_u16(reinterpret_cast<std::uint16_t*>(p), simd::Neon::to_halves<T>(x));
  }

 private:
  [[gnu::always_inline]] static float32x4_t max(float32x4_t a, float32x4_t b) {
    return vbslq_f32(vcgtq_f32(a, b), a, b);
  }
  [[gnu::always_inline]] static float32x4_t power(int32x4_t n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
  }
  [[gnu::always_inline]] static float32x4_t scale2(float32x4_t a, float32x4_t n) {
    const int32x4_t whole = vcvtq_s32_f32(n), half = vshrq_n_s32(whole, 1);
    return vmulq_f32(vmulq_f32(a, power(half)), power(vsubq_s32(whole, half)));
  }
  // (0 + 2) + (1 + 3) of each.
  [[gnu::always_inline]] static float32x4_t sums_of_four(float32x4_t a, float32x4_t b,
                                                         float32x4_t c, float32x4_t d) {
    const float64x2_t ab = vreinterpretq_f64_f32(vaddq_f32(vzip1q_f32(a, b), vzip2q_f32(a, b)));
    const float64x2_t cd = vreinterpretq_f64_f32(vaddq_f32(vzip1q_f32(c, d), vzip2q_f32(c, d)));
    return vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(ab, cd)),
                     vreinterpretq_f32_f64(vzip2q_f64(ab, cd)));
  }
};

}  // namespace monograph
