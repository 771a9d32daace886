#pragma once

#include "monograph/simd/lanes_scalar.h"
#include "monograph/simd/row_lanes.h"

namespace monograph {

template <>
struct RowLanes<simd::Scalar> : Lanes<simd::Scalar> {
  // A library call where the CPU has no such instruction.
  [[gnu::always_inline]] static F32 fused(F32 a, F32 b, F32 c) { return __builtin_fmaf(a, b, c); }
  [[gnu::always_inline]] static F32 sqrt(F32 x) { return __builtin_sqrtf(x); }
  using Doubles = double;
  [[gnu::always_inline]] static void add_squares(Doubles& sum, F32 x) {
    sum += static_cast<double>(x) * static_cast<double>(x);
  }
  [[gnu::always_inline]] static void store_doubles(double* p, const Doubles& x) { *p = x; }
  template <class T>
  [[gnu::always_inline]] static F32 round_as(F32 x) {
    return to_float(from_float<T>(x));
  }
  template <class T>
  [[gnu::always_inline]] static void store_two(T* p, F32 a, F32 b) {
    store_as(p, a);
    store_as(p + 1, b);
  }
  template <class T>
  [[gnu::always_inline]] static void store_rounded(T* p, F32 x) {
    store_as(p, x);
  }
  template <class T>
  [[gnu::always_inline]] static void ordered_as(F32&, F32&) {}
};

}  // namespace monograph
