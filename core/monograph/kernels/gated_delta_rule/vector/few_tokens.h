// The recurrence token by token, for documents of few tokens: columns of the state are independent,
// so a panel of them passes all tokens while it is in registers or L1, and the state is read and
// written once.
#pragma once

#include "monograph/kernels/gated_delta_rule/vector/chunk.h"

namespace monograph {

template <class V, class T>
struct DeltaFewTokens {
  using L = Lanes<V>;
  using F32 = typename L::F32;
  static constexpr std::int64_t kPanel = 32;
  static constexpr std::int64_t kVectors = kPanel / L::kLanes;

  // Numbers of one token.
  struct Token {
    float q[kLargestDeltaHead], k[kLargestDeltaHead], v[kLargestDeltaHead];
    float out[kLargestDeltaHead];
    float decay, beta;
  };

  static void load(const DeltaForwardUnit& unit, const DeltaWidths& w, std::int64_t token,
                   std::size_t head, Token& to) {
    const DeltaRuleForward& job = unit.job;
    float factor[1];
    DeltaChunk<V> one;
    one.tokens = one.rows = 1;
    one.template load_normed<T>(job.q, token, unit.key_head, w.key, w.key_width, w.key_stride,
                                job.problem.l2norm, job.problem.scale, factor, to.q);
    one.template load_normed<T>(job.k, token, unit.key_head, w.key, w.key_width, w.key_stride,
                                job.problem.l2norm, 1, factor, to.k);
    const std::int64_t panels = (w.value + kPanel - 1) / kPanel * kPanel;
    one.template load_rows<T>(job.v, token, head, w.value, panels, panels, to.v);
    const float g = DeltaChunk<V>::template gate<T>(job.g, token, head);
    float lanes[16];
    L::store(lanes, exp2_of<V>(L::set((g < kLeastDecay ? kLeastDecay : g) * kLog2E)));
    to.decay = lanes[0];
    to.beta = DeltaChunk<V>::template gate<T>(job.beta, token, head);
  }

  // A panel of `state` [key, kPanel] with the columns [column, column + kPanel) of the token.
  static void step(const DeltaWidths& w, Token& t, std::int64_t column, float* state) {
    F32 kept[kVectors], out[kVectors];
    const F32 e = L::set(t.decay), b = L::set(t.beta);
    for (std::int64_t n = 0; n < kVectors; ++n) kept[n] = out[n] = L::set(0.f);
    for (std::int64_t r = 0; r < w.key; ++r) {
      const F32 k = L::set(t.k[r]);
      for (std::int64_t n = 0; n < kVectors; ++n)
        kept[n] = L::fma(k, L::load(state + r * kPanel + n * L::kLanes), kept[n]);
    }
    for (std::int64_t n = 0; n < kVectors; ++n)
      kept[n] = L::mul(b, L::sub(L::load(t.v + column + n * L::kLanes), L::mul(e, kept[n])));
    for (std::int64_t r = 0; r < w.key; ++r) {
      const F32 k = L::set(t.k[r]), q = L::set(t.q[r]);
      for (std::int64_t n = 0; n < kVectors; ++n) {
        float* const at = state + r * kPanel + n * L::kLanes;
        const F32 s = L::fma(e, L::load(at), L::mul(k, kept[n]));
        L::store(at, s);
        out[n] = L::fma(q, s, out[n]);
      }
    }
    for (std::int64_t n = 0; n < kVectors; ++n) L::store(t.out + column + n * L::kLanes, out[n]);
  }

  static void run(const DeltaForwardUnit& unit, std::size_t head) {
    const DeltaRuleForward& job = unit.job;
    const DeltaWidths w(job.problem, 16);
    Token tokens[kFewTokens];
    for (std::int64_t t = 0; t < unit.tokens; ++t) load(unit, w, unit.begin + t, head, tokens[t]);
    const std::size_t at = unit.state_at(head);
    alignas(64) float panel[kLargestDeltaHead * kPanel];
    for (std::int64_t column = 0; column < w.value; column += kPanel) {
      const std::int64_t count = w.value - column < kPanel ? w.value - column : kPanel;
      for (std::int64_t r = 0; r < w.key; ++r) {
        if (job.problem.state != nullptr)
          widen_row<V>(job.problem.state + at + r * w.value + column, count, kPanel,
                       panel + r * kPanel);
        else
          clear_floats<V>(panel + r * kPanel, kPanel);
      }
      for (std::int64_t t = 0; t < unit.tokens; ++t) step(w, tokens[t], column, panel);
      for (std::int64_t r = 0; r < w.key && job.final_state != nullptr; ++r)
        narrow_row<V>(panel + r * kPanel, 1, count, job.final_state + at + r * w.value + column);
    }
    for (std::int64_t t = 0; t < unit.tokens; ++t)
      narrow_row<V>(tokens[t].out, 1, w.value, row_of<T>(job.out, unit.begin + t, head));
  }
};

}  // namespace monograph
