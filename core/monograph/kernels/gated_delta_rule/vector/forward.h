// The forward for storage type T, on any vector vocabulary V and with its products.
#pragma once

#include "monograph/kernels/gated_delta_rule/vector/chunk.h"

namespace monograph {

template <class V, class T, class Products>
struct DeltaForward {
  static constexpr std::int64_t kMultiple = Products::kMultiple;

  struct Memory {
    DeltaChunk<V> chunk;
    Products products;
    float *out, *states;  // [kChunk, value_stride]; a state per value head
  };

  [[gnu::always_inline]] static Memory allocate(const DeltaRuleProblem& p,
                                                BumpAllocator& allocator) {
    const DeltaWidths w(p, kMultiple);
    Memory m;
    m.chunk = DeltaChunk<V>::allocate(w, allocator);
    m.products = Products::allocate(w, false, allocator);
    m.out = allocator.take<float>(kChunk * w.value_stride);
    m.states = allocator.take<float>(static_cast<std::int64_t>(p.value_heads / p.key_heads) *
                                     w.state_floats());
    return m;
  }

  static std::size_t bytes(const DeltaRuleProblem& p) {
    BumpAllocator allocator{nullptr};
    allocate(p, allocator);
    return allocator.bytes();
  }

  static void run(const DeltaForwardUnit& unit, std::byte* scratch) {
    const DeltaRuleForward& job = unit.job;
    const DeltaRuleProblem& p = job.problem;
    const DeltaWidths w(p, kMultiple);
    BumpAllocator allocator{scratch};
    Memory m = allocate(p, allocator);
    DeltaChunk<V>& c = m.chunk;
    const std::size_t first = unit.key_head * unit.group();
    m.products.begin();
    for (std::size_t g = 0; g < unit.group() && p.state != nullptr; ++g)
      load_state<V>(w, p.state + unit.state_at(first + g), state_of(m, w, g));
    for (std::int64_t at = 0; at < unit.tokens; at += kChunk) {
      const std::int64_t token = unit.begin + at;
      const bool fresh = at == 0 && p.state == nullptr;
      c.resize(unit.tokens - at < kChunk ? unit.tokens - at : kChunk, kMultiple);
      if constexpr (Products::kReadsRows) {
        c.template load_normed<T>(job.q, token, unit.key_head, w.key, w.key_width, w.key_stride,
                                  p.l2norm, p.scale, c.q_factor, c.q);
        c.template load_normed<T>(job.k, token, unit.key_head, w.key, w.key_width, w.key_stride,
                                  p.l2norm, 1, c.k_factor, c.k);
      } else {
        c.template load_norms<T>(job.q, token, unit.key_head, w.key, p.l2norm, c.q_factor);
        c.template load_norms<T>(job.k, token, unit.key_head, w.key, p.l2norm, c.k_factor);
      }
      m.products.multiply_keys(w, c, job.q, job.k, token, unit.key_head, p.scale, true);
      for (std::size_t g = 0; g < unit.group(); ++g) {
        float* const state = state_of(m, w, g);
        c.template load_rows<T>(job.v, token, first + g, w.value, w.value_width, w.value_stride,
                                c.v);
        c.template load_gates<T>(job.g, job.beta, token, first + g, true);
        c.values(w, m.products, state, fresh);
        m.products.attend(w, c, state, fresh, m.out, p.scale);
        for (std::int64_t r = 0; r < c.tokens; ++r)
          narrow_row<V>(m.out + r * w.value_stride, 1, w.value,
                        row_of<T>(job.out, token + r, first + g));
        if (job.final_state != nullptr || at + kChunk < unit.tokens)
          m.products.advance(w, c, state, state, fresh);
      }
    }
    m.products.end();
    for (std::size_t g = 0; g < unit.group() && job.final_state != nullptr; ++g)
      store_state<V>(w, state_of(m, w, g), job.final_state + unit.state_at(first + g));
  }

  [[gnu::always_inline]] static float* state_of(const Memory& m, const DeltaWidths& w,
                                                std::size_t g) {
    return m.states + static_cast<std::int64_t>(g) * w.state_floats();
  }
};

}  // namespace monograph
