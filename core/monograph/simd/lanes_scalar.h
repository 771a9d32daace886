// One lane, and eight. No fused multiply-add: without the instruction it is a library call.
#pragma once

#include <bit>

#include "monograph/simd/lanes.h"

namespace monograph {

template <>
struct Lanes<simd::Scalar> {
  static constexpr std::int64_t kLanes = 1;
  using F32 = float;

  [[gnu::always_inline]] static F32 set(float x) { return x; }
  [[gnu::always_inline]] static F32 load(const float* p) { return *p; }
  [[gnu::always_inline]] static void store(float* p, F32 x) { *p = x; }
  [[gnu::always_inline]] static F32 add(F32 a, F32 b) { return a + b; }
  [[gnu::always_inline]] static F32 sub(F32 a, F32 b) { return a - b; }
  [[gnu::always_inline]] static F32 mul(F32 a, F32 b) { return a * b; }
  [[gnu::always_inline]] static F32 div(F32 a, F32 b) { return a / b; }
  [[gnu::always_inline]] static F32 fma(F32 a, F32 b, F32 c) { return a * b + c; }
  [[gnu::always_inline]] static F32 max(F32 a, F32 b) { return a > b ? a : b; }
  [[gnu::always_inline]] static F32 min(F32 a, F32 b) { return a < b ? a : b; }
  // Adding 1.5 * 2^23 leaves no bit for a fraction.
  [[gnu::always_inline]] static F32 round(F32 a) { return (a + 0x1.8p23f) - 0x1.8p23f; }
  [[gnu::always_inline]] static F32 scale2(F32 a, F32 n) {
    if (!(n == n)) return n;
    const int whole = static_cast<int>(n), half = whole / 2;
    return a * power(half) * power(whole - half);
  }
  [[gnu::always_inline]] static float reduce_add(F32 a) { return a; }
  [[gnu::always_inline]] static float reduce_max(F32 a) { return a; }

  template <class T>
  [[gnu::always_inline]] static F32 load_as(const T* p) {
    return to_float(*p);
  }
  template <class T>
  static constexpr bool kSplits = false;
  template <class T>
  [[gnu::always_inline]] static void load_two(const T* p, F32& a, F32& b) {
    a = load_as(p);
    b = load_as(p + 1);
  }
  template <class T>
  [[gnu::always_inline]] static void store_as(T* p, F32 x) {
    *p = from_float<T>(x);
  }

 private:
  [[gnu::always_inline]] static float power(int n) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(n + 127) << 23);
  }
};

// Eight lanes in plain C++, which compilers map to whatever the baseline has: the part that
// products need. Products are rounded before they are added, as above.
template <>
struct Lanes<simd::Scalar8> {
  static constexpr std::size_t kLanes = 8;
  struct F32 {
    float lane[kLanes];
  };

  [[gnu::always_inline]] static F32 set(float x) { return {{x, x, x, x, x, x, x, x}}; }
  [[gnu::always_inline]] static F32 load(const float* p) { return load_as(p); }
  [[gnu::always_inline]] static void store(float* p, F32 v) {
    for (std::size_t i = 0; i < kLanes; ++i) p[i] = v.lane[i];
  }
  [[gnu::always_inline]] static F32 add(F32 a, F32 b) {
    for (std::size_t i = 0; i < kLanes; ++i) a.lane[i] += b.lane[i];
    return a;
  }
  [[gnu::always_inline]] static F32 fma(F32 a, F32 b, F32 c) {
    for (std::size_t i = 0; i < kLanes; ++i) c.lane[i] += a.lane[i] * b.lane[i];
    return c;
  }
  [[gnu::always_inline]] static void sum4(const F32 (&v)[4], float* out) {
    for (std::size_t n = 0; n < 4; ++n) {
      const float* a = v[n].lane;
      out[n] = ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
    }
  }

  template <class T>
  [[gnu::always_inline]] static F32 load_as(const T* p) {
    F32 v;
    for (std::size_t i = 0; i < kLanes; ++i) v.lane[i] = to_float(p[i]);
    return v;
  }
};

}  // namespace monograph
