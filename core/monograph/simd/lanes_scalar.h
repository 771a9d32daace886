// One lane. No fused multiply-add: without the instruction it is a library call.
#pragma once

#include <bit>

#include "monograph/simd/lanes.h"

namespace monograph {

template <>
struct Lanes<simd::Scalar> {
  static constexpr std::int64_t kLanes = 1, kRows = 4, kVectors = 2;
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

}  // namespace monograph
