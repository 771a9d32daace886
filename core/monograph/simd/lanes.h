// fp32 arithmetic on vectors. Lanes<V> is specialised beside the intrinsics, in lanes_<isa>.h; what
// can be said without them stands here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "monograph/base/float_types.h"
#include "monograph/cpu/tags.h"

namespace monograph {

inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kLn2 = 0.693147180559945309f;

// kLanes, F32, set, load, store, add, sub, mul, div, fma (a * b + c), max, min, round (to
// integral), scale2 (a * 2^n for integral n within +-200), reduce_add, reduce_max, sum4 (of each of
// four vectors the sum, by one tree; not with one lane). load_as and store_as convert kLanes
// elements of a storage type; load_two takes 2 * kLanes, where kSplits<T> the even ones first: for
// bf16 a shift and a mask.
template <class V>
struct Lanes;

// 2^x: relative error 2e-7; 2^0 = 1 exactly, 2^-inf = 0, NaN stays.
template <class V>
[[gnu::always_inline]] inline typename Lanes<V>::F32 exp2_of(typename Lanes<V>::F32 x) {
  using L = Lanes<V>;
  // The operand that may be NaN stands second: max and min return it then.
  const typename L::F32 y = L::min(L::set(200.f), L::max(L::set(-200.f), x));
  const typename L::F32 n = L::round(y), f = L::sub(y, n);
  typename L::F32 p = L::set(0x1.41fbbcp-13f);
  p = L::fma(p, f, L::set(0x1.5f3e54p-10f));
  p = L::fma(p, f, L::set(0x1.3b2d4cp-7f));
  p = L::fma(p, f, L::set(0x1.c6aee8p-5f));
  p = L::fma(p, f, L::set(0x1.ebfbdcp-3f));
  p = L::fma(p, f, L::set(0x1.62e43p-1f));
  p = L::fma(p, f, L::set(1.f));
  return L::scale2(p, n);
}

// tanh(x) = 1 - 2 / (1 + 2^(2 x log2 e)); absolute error about 3e-7.
template <class V>
[[gnu::always_inline]] inline typename Lanes<V>::F32 tanh_of(typename Lanes<V>::F32 x) {
  using L = Lanes<V>;
  const typename L::F32 e = exp2_of<V>(L::mul(x, L::set(2 * kLog2E)));
  return L::sub(L::set(1.f), L::div(L::set(2.f), L::add(L::set(1.f), e)));
}

}  // namespace monograph
