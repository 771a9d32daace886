// Activations and their slopes on vectors; one rounding where `fused` stands, on every instruction
// set: the same bits everywhere.
#pragma once

#include "monograph/simd/row_lanes.h"

namespace monograph {

// Of e^-r for |r| <= ln 2 / 2.
inline constexpr float kExp[7] = {
    1.f, -1.f, 0x1.fffffcp-2f, -0x1.555490p-3f, 0x1.5558f4p-5f, -0x1.123a6cp-7f, 0x1.6a2352p-10f};

// e^-x, off by less than one unit in the last place: x = r - n ln 2 with ln 2 in two parts, e^-r by
// its polynomial of degree 6 (relative error 5e-9). NaN stays.
template <class V>
[[gnu::always_inline]] inline typename RowLanes<V>::F32 exp_of_minus(typename RowLanes<V>::F32 x) {
  using L = RowLanes<V>;
  using F32 = typename L::F32;
  constexpr float kShift = 0x1.8p23f;  // leaves no bit for a fraction
  // The operand that may be NaN stands second: max and min return it then.
  const F32 y = L::min(L::set(110.f), L::max(L::set(-100.f), x));
  const F32 n = L::sub(L::fused(y, L::set(-kLog2E), L::set(kShift)), L::set(kShift));
  const F32 r = L::fused(n, L::set(-0x1.05c610p-29f), L::fused(n, L::set(0x1.62e43p-1f), y));
  F32 p = L::set(kExp[6]);
  for (int i = 5; i >= 0; --i) p = L::fused(p, r, L::set(kExp[i]));
  return L::scale2(p, n);
}

template <class F32>
struct ValueAndSlope {
  F32 value, slope;
};

// x / (1 + e^-z) = x s, and its slope s + x s (1 - s) dz, where 1 - s = e^-z s. e^-z may be
// infinite and s 0. Types of 16 bits take the product: no second division beside that of the slope,
// and they do not see its rounding.
template <class V, class T>
[[gnu::always_inline]] inline typename RowLanes<V>::F32 quotient(typename RowLanes<V>::F32 x,
                                                                 typename RowLanes<V>::F32 below,
                                                                 typename RowLanes<V>::F32 s) {
  return sizeof(T) == 4 ? RowLanes<V>::div(x, below) : RowLanes<V>::mul(x, s);
}

template <class V>
struct Silu {
  using L = RowLanes<V>;
  using F32 = typename L::F32;

  template <class T>
  [[gnu::always_inline]] static F32 value(F32 x) {
    const F32 one = L::set(1.f), below = L::add(one, exp_of_minus<V>(x));
    return quotient<V, T>(x, below, L::div(one, below));
  }
  template <class T>
  [[gnu::always_inline]] static ValueAndSlope<F32> with_slope(F32 x) {
    const F32 one = L::set(1.f), e = exp_of_minus<V>(x), below = L::add(one, e);
    const F32 s = L::div(one, below), value = quotient<V, T>(x, below, s);
    const F32 rest = L::mul(L::min(L::set(3e38f), e), s);
    return {value, L::fused(L::min(L::set(120.f), value), rest, s)};
  }
};

// 0.5 x (1 + tanh(z / 2)) = x / (1 + e^-z), z = 2 sqrt(2 / pi) (x + 0.044715 x^3): no cancellation.
template <class V>
struct GeluTanh {
  using L = RowLanes<V>;
  using F32 = typename L::F32;
  static constexpr float kTwice = 1.5957691216057308f, kCubic = 0.044715f;

  [[gnu::always_inline]] static F32 z_of(F32 x) {
    const F32 factor = L::fused(L::mul(x, x), L::set(kTwice * kCubic), L::set(kTwice));
    return L::mul(x, factor);
  }
  template <class T>
  [[gnu::always_inline]] static F32 value(F32 x) {
    const F32 one = L::set(1.f), below = L::add(one, exp_of_minus<V>(z_of(x)));
    return quotient<V, T>(x, below, L::div(one, below));
  }
  // Beyond +-64 s is 0 or 1, and x^2 could be infinite.
  template <class T>
  [[gnu::always_inline]] static ValueAndSlope<F32> with_slope(F32 x) {
    const F32 one = L::set(1.f), e = exp_of_minus<V>(z_of(x)), below = L::add(one, e);
    const F32 s = L::div(one, below);
    const F32 rest = L::mul(L::min(L::set(3e38f), e), s);
    const F32 bounded = L::min(L::set(64.f), L::max(L::set(-64.f), x));
    const F32 square = L::mul(bounded, bounded);
    const F32 dz = L::fused(square, L::set(3 * kTwice * kCubic), L::set(kTwice));
    return {quotient<V, T>(x, below, s), L::fused(L::mul(L::mul(bounded, s), rest), dz, s)};
  }
};

// x Phi(x) = max(x, 0) - |x| h, h = Phi(-|x|) = e^(-x^2 / 2) t p(t) with t = 1 / (1 + 0.3 |x|): p
// of degree 9, relative error 4e-9 up to |x| = 14, where h is 0 in fp32.
template <class V>
struct Gelu {
  using L = RowLanes<V>;
  using F32 = typename L::F32;
  static constexpr float kTail[10] = {
      0x1.ea3c88p-4f,  0x1.e9c534p-4f, 0x1.c37dc6p-4f,  0x1.413af4p-4f, 0x1.8974a0p-4f,
      -0x1.449a30p-4f, 0x1.885ccep-3f, -0x1.d315b0p-3f, 0x1.cc4b16p-4f, -0x1.51b8e0p-6f};

  struct Parts {
    F32 bounded, size, bell, h;  // x within +-64 and its size, e^(-x^2 / 2), h
  };
  [[gnu::always_inline]] static Parts parts(F32 x) {
    Parts p;
    p.bounded = L::min(L::set(64.f), L::max(L::set(-64.f), x));
    p.size = L::max(L::sub(L::set(0.f), p.bounded), p.bounded);
    p.bell = exp_of_minus<V>(L::mul(L::mul(p.size, p.size), L::set(0.5f)));
    const F32 t = L::div(L::set(1.f), L::fused(p.size, L::set(0.3f), L::set(1.f)));
    F32 sum = L::set(kTail[9]);
    for (int i = 8; i >= 0; --i) sum = L::fused(sum, t, L::set(kTail[i]));
    p.h = L::mul(L::mul(p.bell, t), sum);
    return p;
  }
  [[gnu::always_inline]] static F32 value_of(F32 x, const Parts& p) {
    return L::sub(L::max(L::set(0.f), x), L::mul(p.size, p.h));
  }
  template <class T>
  [[gnu::always_inline]] static F32 value(F32 x) {
    return value_of(x, parts(x));
  }
  // Phi(x) + x phi(x), Phi(x) = 0.5 +- (0.5 - h).
  template <class T>
  [[gnu::always_inline]] static ValueAndSlope<F32> with_slope(F32 x) {
    const Parts p = parts(x);
    const F32 steep = L::mul(p.bounded, L::set(0x1p100f));
    const F32 sign = L::min(L::set(1.f), L::max(L::set(-1.f), steep));
    const F32 phi = L::mul(p.bell, L::set(0.3989422804014327f));
    const F32 below = L::add(L::set(0.5f), L::mul(sign, L::sub(L::set(0.5f), p.h)));
    return {value_of(x, p), L::add(below, L::mul(p.bounded, phi))};
  }
};

}  // namespace monograph
