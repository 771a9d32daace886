// The activations on vectors: h, and what a change of h is for gate and up. Those with a gate take
// both, the others leave `up` alone.
#pragma once

#include "monograph/kernels/experts/kernels.h"
#include "monograph/kernels/gated_activation/activations.h"

namespace monograph {

template <class F32>
struct ActivationSlopes {
  F32 h, gate, up;  // dh times the slopes
};

// 1 where x <= limit and 0 above; NaN stays.
template <class V>
[[gnu::always_inline]] inline typename RowLanes<V>::F32 below(typename RowLanes<V>::F32 x,
                                                              typename RowLanes<V>::F32 limit) {
  using L = RowLanes<V>;
  const auto excess = L::sub(x, L::min(limit, x));
  return L::max(L::set(0.f), L::sub(L::set(1.f), L::mul(excess, L::set(0x1p120f))));
}
template <class V>
[[gnu::always_inline]] inline typename RowLanes<V>::F32 clamped(typename RowLanes<V>::F32 x,
                                                                float limit) {
  using L = RowLanes<V>;
  return L::min(L::set(limit), L::max(L::set(-limit), x));
}
template <class V>
[[gnu::always_inline]] inline typename RowLanes<V>::F32 within(typename RowLanes<V>::F32 x,
                                                               float limit) {
  using L = RowLanes<V>;
  return L::mul(below<V>(x, L::set(limit)), below<V>(L::sub(L::set(0.f), x), L::set(limit)));
}

template <class V, class T, template <class> class F>
struct PlainGate {
  using F32 = typename RowLanes<V>::F32;
  using L = RowLanes<V>;
  static constexpr bool kGated = true;
  [[gnu::always_inline]] static F32 value(const ActivationJob&, F32 gate, F32 up) {
    return L::mul(F<V>::template value<T>(gate), up);
  }
  [[gnu::always_inline]] static ActivationSlopes<F32> slopes(const ActivationJob&, F32 gate, F32 up,
                                                             F32 d) {
    const auto f = F<V>::template with_slope<T>(gate);
    return {L::mul(f.value, up), L::mul(L::mul(d, up), f.slope), L::mul(d, f.value)};
  }
};

template <class V, class T>
struct ClampedSiluGate {
  using F32 = typename RowLanes<V>::F32;
  using L = RowLanes<V>;
  static constexpr bool kGated = true;
  [[gnu::always_inline]] static F32 value(const ActivationJob& job, F32 gate, F32 up) {
    const F32 bounded = L::min(L::set(job.limit), gate);
    return L::mul(Silu<V>::template value<T>(bounded), clamped<V>(up, job.limit));
  }
  [[gnu::always_inline]] static ActivationSlopes<F32> slopes(const ActivationJob& job, F32 gate,
                                                             F32 up, F32 d) {
    const auto f = Silu<V>::template with_slope<T>(L::min(L::set(job.limit), gate));
    const F32 u = clamped<V>(up, job.limit);
    return {L::mul(f.value, u),
            L::mul(L::mul(L::mul(d, u), f.slope), below<V>(gate, L::set(job.limit))),
            L::mul(L::mul(d, f.value), within<V>(up, job.limit))};
  }
};

template <class V, class T>
struct ClampedGlu {
  using F32 = typename RowLanes<V>::F32;
  using L = RowLanes<V>;
  static constexpr bool kGated = true;
  [[gnu::always_inline]] static F32 value(const ActivationJob& job, F32 gate, F32 up) {
    const F32 g = L::min(L::set(job.limit), gate), one = L::set(1.f);
    const F32 under = L::add(one, exp_of_minus<V>(L::mul(L::set(job.alpha), g)));
    const F32 glu = quotient<V, T>(g, under, L::div(one, under));
    return L::mul(L::add(clamped<V>(up, job.limit), one), glu);
  }
  // The slope of g s(z), z = alpha g, is s + z s (1 - s), and 1 - s = e^-z s.
  [[gnu::always_inline]] static ActivationSlopes<F32> slopes(const ActivationJob& job, F32 gate,
                                                             F32 up, F32 d) {
    const F32 g = L::min(L::set(job.limit), gate), one = L::set(1.f);
    const F32 z = L::mul(L::set(job.alpha), g), e = exp_of_minus<V>(z), under = L::add(one, e);
    const F32 s = L::div(one, under), glu = quotient<V, T>(g, under, s);
    const F32 rest = L::mul(L::min(L::set(3e38f), e), s);
    const F32 slope = L::fused(L::min(L::set(120.f), L::mul(z, s)), rest, s);
    const F32 factor = L::add(clamped<V>(up, job.limit), one);
    return {L::mul(factor, glu),
            L::mul(L::mul(L::mul(d, factor), slope), below<V>(gate, L::set(job.limit))),
            L::mul(L::mul(d, glu), within<V>(up, job.limit))};
  }
};

template <class V, class T>
struct ReluSquare {
  using F32 = typename RowLanes<V>::F32;
  using L = RowLanes<V>;
  static constexpr bool kGated = false;
  [[gnu::always_inline]] static F32 value(const ActivationJob&, F32 pre, F32) {
    const F32 positive = L::max(L::set(0.f), pre);
    return L::mul(positive, positive);
  }
  [[gnu::always_inline]] static ActivationSlopes<F32> slopes(const ActivationJob&, F32 pre, F32 up,
                                                             F32 d) {
    const F32 positive = L::max(L::set(0.f), pre);
    return {L::mul(positive, positive), L::mul(d, L::add(positive, positive)), up};
  }
};

template <class V, class T>
struct SiluAlone {
  using F32 = typename RowLanes<V>::F32;
  using L = RowLanes<V>;
  static constexpr bool kGated = false;
  [[gnu::always_inline]] static F32 value(const ActivationJob&, F32 pre, F32) {
    return Silu<V>::template value<T>(pre);
  }
  [[gnu::always_inline]] static ActivationSlopes<F32> slopes(const ActivationJob&, F32 pre, F32 up,
                                                             F32 d) {
    const auto f = Silu<V>::template with_slope<T>(pre);
    return {f.value, L::mul(d, f.slope), up};
  }
};

}  // namespace monograph
