// The backward for storage type T, on any vector vocabulary V and with its products. A chunk, from
// the last to the first, with S at its start, dS at its end, O' = e^G dout and the strictly lower L
// of the solve (dec, P, V^, U = v - e^G k S as in the forward):
//   dV^ = P' dout + tail (k dS)          dR = (I + L)'^-1 dV^        dv = beta dR
//   ds  = tril((dout V^') dec)           M  = -tril((dR V^') dec, -1)     dKS = -beta e^G dR
//   dq  = O' S' + ds k
//   dk  = tail (V^ dS') + ds' q + dKS S' + (beta M) k + (beta M)' k
//   dbeta = sum(dR U) + sum(M (k k'))
//   dS <- e^G[last] dS + q' O' + k' dKS
// dG is summed over strictly lower pairs, the last row's tail left out: what would cancel is never
// added, which keeps dg right where decays are strong.
#pragma once

#include "monograph/kernels/gated_delta_rule/vector/chunk.h"

namespace monograph {

// The chunks whose states a thread keeps at a time.
[[gnu::always_inline]] inline std::int64_t kept_chunks(std::size_t group, std::int64_t floats,
                                                       std::int64_t chunks) {
  const std::int64_t each = static_cast<std::int64_t>(group * sizeof(float)) * floats;
  const std::int64_t fit = static_cast<std::int64_t>(kKeptStates) / each;
  return fit >= chunks ? chunks : fit < 8 ? (chunks < 8 ? chunks : 8) : fit;
}

template <class V, class T, class Products>
struct DeltaBackward {
  using L = Lanes<V>;
  using F32 = typename L::F32;
  using Chunk = DeltaChunk<V>;
  static constexpr std::int64_t kMultiple = Products::kMultiple;

  struct Memory {
    Chunk chunk;
    Products products;
    // States at the starts of segments and of a segment's chunks, [.., group]; dS of each head.
    float *segments, *states, *dstates;
    float *dq, *dk, *product;                   // [kChunk, key_stride]
    float *dout, *dout_scaled, *dsolved, *dks;  // [kChunk, value_stride]
    float* solved_transposed;                   // [value_width, kPairStride]
    float *ds, *m;                              // [kChunk, kPairStride]
    float *dgate, *dbeta, *columns, *row;       // [kChunk]
  };

  [[gnu::always_inline]] static Memory allocate(const DeltaRuleProblem& p, std::int64_t tokens,
                                                BumpAllocator& allocator) {
    const DeltaWidths w(p, kMultiple);
    const std::size_t group = p.value_heads / p.key_heads;
    const std::int64_t heads = static_cast<std::int64_t>(group);
    const std::int64_t chunks = (tokens + kChunk - 1) / kChunk;
    const std::int64_t kept = kept_chunks(group, w.state_floats(), chunks);
    Memory m;
    m.chunk = Chunk::allocate(w, allocator);
    m.products = Products::allocate(w, true, allocator);
    m.segments = allocator.take<float>((chunks + kept - 1) / kept * heads * w.state_floats());
    m.states = allocator.take<float>(kept * heads * w.state_floats());
    m.dstates = allocator.take<float>(heads * w.state_floats());
    for (float** const at : {&m.dq, &m.dk, &m.product})
      *at = allocator.take<float>(kChunk * w.key_stride);
    for (float** const at : {&m.dout, &m.dout_scaled, &m.dsolved, &m.dks})
      *at = allocator.take<float>(kChunk * w.value_stride);
    for (float** const at : {&m.ds, &m.m}) *at = allocator.take<float>(kChunk * kPairStride);
    for (float** const at : {&m.dgate, &m.dbeta, &m.columns, &m.row})
      *at = allocator.take<float>(kChunk);
    return m;
  }

  static std::size_t bytes(const DeltaRuleProblem& p, std::int64_t tokens) {
    BumpAllocator allocator{nullptr};
    allocate(p, tokens, allocator);
    return allocator.bytes();
  }

  const DeltaBackwardUnit& unit;
  const DeltaRuleProblem& p;
  const DeltaWidths w;
  const std::size_t first;
  Memory m;

  [[gnu::always_inline]] DeltaBackward(const DeltaBackwardUnit& of, std::byte* scratch)
      : unit(of), p(of.job.problem), w(p, kMultiple), first(of.key_head * of.group()) {
    BumpAllocator allocator{scratch};
    m = allocate(p, unit.tokens, allocator);
  }

  static void run(const DeltaBackwardUnit& unit, std::byte* scratch) {
    DeltaBackward backward(unit, scratch);
    backward.m.products.begin();
    backward.document();
    backward.m.products.end();
  }

  [[gnu::always_inline]] float* head_of(float* states, std::int64_t index, std::size_t g) const {
    return states +
           (index * static_cast<std::int64_t>(unit.group()) + static_cast<std::int64_t>(g)) *
               w.state_floats();
  }
  [[gnu::always_inline]] bool fresh(std::int64_t chunk) const {
    return chunk == 0 && p.state == nullptr;
  }

  void document() {
    const std::int64_t chunks = (unit.tokens + kChunk - 1) / kChunk;
    const std::int64_t kept = kept_chunks(unit.group(), w.state_floats(), chunks);
    const std::int64_t segments = (chunks + kept - 1) / kept;
    for (std::size_t g = 0; g < unit.group(); ++g) {
      const std::size_t at = unit.state_at(first + g);
      load_state<V>(w, p.state == nullptr ? nullptr : p.state + at, head_of(m.segments, 0, g));
      load_state<V>(w, unit.job.dfinal == nullptr ? nullptr : unit.job.dfinal + at,
                    head_of(m.dstates, 0, g));
    }
    // All but the first segment are full: what is scanned twice is what the last one leaves.
    const auto start = [&](std::int64_t s) __attribute__((always_inline)) {
      return s == 0 ? 0 : chunks - (segments - s) * kept;
    };
    for (std::int64_t s = 0; s + 1 < segments; ++s)
      for (std::int64_t c = start(s); c < start(s + 1); ++c)
        scan(c, head_of(m.segments, c == start(s) ? s : s + 1, 0), head_of(m.segments, s + 1, 0));
    for (std::int64_t s = segments - 1; s >= 0; --s) {
      const std::int64_t begin = start(s), end = start(s + 1);
      for (std::size_t g = 0; g < unit.group(); ++g)
        copy_state(head_of(m.segments, s, g), head_of(m.states, 0, g));
      for (std::int64_t c = begin; c + 1 < end; ++c)
        scan(c, head_of(m.states, c - begin, 0), head_of(m.states, c - begin + 1, 0));
      for (std::int64_t c = end - 1; c >= begin; --c)
        chunk(c, head_of(m.states, c - begin, 0), c == chunks - 1);
    }
    for (std::size_t g = 0; g < unit.group() && unit.job.dstate != nullptr; ++g)
      store_state<V>(w, head_of(m.dstates, 0, g), unit.job.dstate + unit.state_at(first + g));
  }

  [[gnu::always_inline]] void copy_state(const float* from, float* to) const {
    __builtin_memcpy(to, from, static_cast<std::size_t>(w.state_floats()) * sizeof(float));
  }

  // Without `queries` what a scan needs.
  [[gnu::noinline]] void load_keys(std::int64_t index, bool queries) {
    const DeltaRuleBackward& job = unit.job;
    const std::int64_t at = index * kChunk, token = unit.begin + at;
    Chunk& c = m.chunk;
    c.resize(unit.tokens - at < kChunk ? unit.tokens - at : kChunk, kMultiple);
    if (queries)
      c.template load_normed<T>(job.q, token, unit.key_head, w.key, w.key_width, w.key_stride,
                                p.l2norm, p.scale, c.q_factor, c.q);
    if (queries || Products::kReadsRows)
      c.template load_normed<T>(job.k, token, unit.key_head, w.key, w.key_width, w.key_stride,
                                p.l2norm, 1, c.k_factor, c.k);
    else
      c.template load_norms<T>(job.k, token, unit.key_head, w.key, p.l2norm, c.k_factor);
    m.products.multiply_keys(w, c, job.q, job.k, token, unit.key_head, p.scale, queries);
  }
  [[gnu::always_inline]] void load_values(std::int64_t index, std::size_t g, bool queries) const {
    const DeltaRuleBackward& job = unit.job;
    const std::int64_t token = unit.begin + index * kChunk;
    m.chunk.template load_rows<T>(job.v, token, first + g, w.value, w.value_width, w.value_stride,
                                  m.chunk.v);
    m.chunk.template load_gates<T>(job.g, job.beta, token, first + g, queries);
  }

  // The states of all value heads at a chunk's end; `from` and `to` may be the same.
  [[gnu::noinline]] void scan(std::int64_t index, float* from, float* to) {
    load_keys(index, false);
    for (std::size_t g = 0; g < unit.group(); ++g) {
      float *const before = head_of(from, 0, g), *const after = head_of(to, 0, g);
      load_values(index, g, false);
      m.chunk.values(w, m.products, before, fresh(index));
      m.products.advance(w, m.chunk, before, after, fresh(index));
    }
  }

  [[gnu::noinline]] void chunk(std::int64_t index, float* states, bool last) {
    const std::int64_t token = unit.begin + index * kChunk;
    load_keys(index, true);
    Chunk& c = m.chunk;
    for (std::int64_t r = 0; r < c.rows; ++r)
      for (float* const sum : {m.dq, m.dk}) clear_floats<V>(sum + r * w.key_stride, w.key_width);
    for (std::size_t g = 0; g < unit.group(); ++g) {
      load_values(index, g, true);
      c.template load_rows<T>(unit.job.dout, token, first + g, w.value, w.value_width,
                              w.value_stride, m.dout);
      const float* const state = head_of(states, 0, g);
      c.values(w, m.products, state, fresh(index));
      float* const dstate = head_of(m.dstates, 0, g);
      value_head(state, dstate, fresh(index), last && unit.job.dfinal == nullptr);
      for (std::int64_t r = 0; r < c.tokens; ++r)
        narrow_row<V>(m.dsolved + r * w.value_stride, c.beta[r], w.value,
                      row_of<T>(unit.job.dv, token + r, first + g));
      store_gates(unit.job.dg, m.dgate, token, first + g);
      store_gates(unit.job.dbeta, m.dbeta, token, first + g);
      const bool wanted = index > 0 || unit.job.dstate != nullptr;
      if (wanted)
        m.products.step_back(w, c, m.dout_scaled, m.dks, last && unit.job.dfinal == nullptr, dstate,
                             p.scale);
    }
    for (std::int64_t r = 0; r < c.tokens; ++r) {
      store_normed(c.q + r * w.key_stride, m.dq + r * w.key_stride, c.q_factor[r], p.scale,
                   row_of<T>(unit.job.dq, token + r, unit.key_head));
      store_normed(c.k + r * w.key_stride, m.dk + r * w.key_stride, c.k_factor[r], 1,
                   row_of<T>(unit.job.dk, token + r, unit.key_head));
    }
  }

  // The gradient of x from that of y = factor scale x with factor = 1 / |x|; 1 without l2norm.
  [[gnu::always_inline]] void store_normed(const float* y, float* dy, float factor, float scale,
                                           T* out) const {
    if (p.l2norm && scale != 0) {
      const F32 along = L::set(-Chunk::dot(y, dy, w.key_width) / scale / scale);
      for (std::int64_t i = 0; i < w.key_width; i += L::kLanes)
        L::store(dy + i, L::fma(along, L::load(y + i), L::load(dy + i)));
    }
    narrow_row<V>(dy, factor * scale, w.key, out);
  }

  void store_gates(const MutableGateView& view, const float* from, std::int64_t token,
                   std::size_t head) const {
    for (std::int64_t r = 0; r < m.chunk.tokens; ++r) {
      const std::ptrdiff_t at =
          (token + r) * view.token_stride + static_cast<std::ptrdiff_t>(head) * view.head_stride;
      if (view.dtype == DType::kFloat32)
        static_cast<float*>(view.data)[at] = from[r];
      else
        static_cast<T*>(view.data)[at] = from_float<T>(from[r]);
    }
  }

  // Everything else of a value head: adds to dq and dk, leaves dR in dsolved, and dgate, dbeta.
  [[gnu::noinline]] void value_head(const float* state, const float* dstate, bool fresh_state,
                                    bool ended) const {
    const Chunk& c = m.chunk;
    for (std::int64_t r = 0; r < c.rows; ++r) m.dgate[r] = m.columns[r] = 0;
    float total = 0;  // of what belongs to the last row's G
    if (!ended) {
      m.products.read_dstate(w, c, dstate, m.dsolved);
      c.scale_rows(m.dsolved, c.to_end, w, m.dsolved);
      m.products.solved_dstate(w, c, dstate, m.product);
      for (std::int64_t r = 0; r < c.rows; ++r) {
        const float along = add_scaled(m.product, c.to_end[r], m.dk, c.k, r);
        if (r + 1 < c.tokens) {  // the last row's tail is 1, whatever G
          m.dgate[r] -= along;
          total += along;
        }
      }
      if (!fresh_state) total += c.from_start[c.rows - 1] * state_dot(state, dstate);
    }
    m.products.p_dout(w, c, m.dout, ended ? 0.f : 1.f, m.dsolved);
    m.products.solve_transposed(w, c, m.dsolved);
    m.products.pairs(w, c, m.dout, m.dsolved, m.ds, m.m);
    pairs();
    c.scale_rows(m.dout, c.from_start, w, m.dout_scaled);
    for (std::int64_t r = 0; r < c.rows; ++r) {
      const F32 f = L::set(-c.beta[r] * c.from_start[r]);
      F32 gate = L::set(0.f);
      for (std::int64_t i = r * w.value_stride; i < r * w.value_stride + w.value_width;
           i += L::kLanes) {
        const F32 dks = L::mul(f, L::load(m.dsolved + i));
        L::store(m.dks + i, dks);
        gate = L::fma(dks, L::load(c.ks + i), gate);
      }
      m.dgate[r] += L::reduce_add(gate);
    }
    if (!fresh_state) {
      m.products.state_gradients(w, c, state, m.dout_scaled, m.dks, m.product, m.dk);
      for (std::int64_t r = 0; r < c.rows; ++r)
        m.dgate[r] += add_scaled(m.product, 1, m.dq, c.q, r);
    }
    m.products.pair_gradients(w, c, m.ds, m.m, m.dq, m.dk, p.scale);
    // dg[t] is the sum of dG from t on.
    m.dgate[c.tokens - 1] += total;
    double sum = 0;
    for (std::int64_t r = c.tokens - 1; r >= 0; --r) {
      sum += static_cast<double>(m.dgate[r]) - static_cast<double>(m.columns[r]);
      m.dgate[r] = static_cast<float>(sum);
    }
  }

  // sum[r] += factor x[r]; returns the part of it along y[r].
  [[gnu::always_inline]] float add_scaled(const float* x, float factor, float* sum, const float* y,
                                          std::int64_t r) const {
    const F32 f = L::set(factor);
    F32 along = L::set(0.f);
    for (std::int64_t i = r * w.key_stride; i < r * w.key_stride + w.key_width; i += L::kLanes) {
      const F32 term = L::mul(f, L::load(x + i));
      L::store(sum + i, L::add(L::load(sum + i), term));
      along = L::fma(term, L::load(y + i), along);
    }
    return L::reduce_add(along);
  }

  float state_dot(const float* a, const float* b) const {
    float sum = 0;
    for (std::int64_t r = 0; r < w.key_width; ++r)
      sum += Chunk::dot(a + r * w.value_stride, b + r * w.value_stride, w.value_width);
    return sum;
  }

  // From dout V^' and dR V^': ds and beta M, the pairs' part of dG in dgate (rows) and columns, and
  // dbeta.
  [[gnu::noinline]] void pairs() const {
    const Chunk& c = m.chunk;
    for (std::int64_t i = 0; i < c.rows; ++i) {
      const std::int64_t row = i * kPairStride, end = (i + 16) / 16 * 16;
      const F32 minus_beta = L::set(-c.beta[i]);
      F32 dbeta = L::set(0.f);
      for (std::int64_t j = 0; j < end; j += L::kLanes) {
        const F32 dout = L::load(m.ds + row + j), dr = L::load(m.m + row + j);
        const F32 decay = L::load(c.decay + row + j);
        L::store(m.row + j,
                 L::fma(dout, L::load(c.p + row + j), L::mul(dr, L::load(c.l + row + j))));
        L::store(m.ds + row + j, L::mul(dout, decay));
        const F32 mm = L::mul(dr, decay);
        L::store(m.m + row + j, mm);
      }
      for (std::int64_t j = i; j < end; ++j) m.row[j] = m.m[row + j] = 0;
      for (std::int64_t j = i + 1; j < end; ++j) m.ds[row + j] = 0;
      F32 sum = L::set(0.f);
      for (std::int64_t j = 0; j < end; j += L::kLanes) {
        const F32 x = L::load(m.row + j), mm = L::load(m.m + row + j);
        sum = L::add(sum, x);
        L::store(m.columns + j, L::add(L::load(m.columns + j), x));
        dbeta = L::fma(mm, L::load(c.kk + row + j), dbeta);
        L::store(m.m + row + j, L::mul(mm, minus_beta));
      }
      m.dgate[i] += L::reduce_add(sum);
      // U = v - e^G k S.
      F32 along = L::set(0.f);
      const F32 e = L::set(-c.from_start[i]);
      for (std::int64_t n = i * w.value_stride; n < i * w.value_stride + w.value_width;
           n += L::kLanes)
        along =
            L::fma(L::load(m.dsolved + n), L::fma(e, L::load(c.ks + n), L::load(c.v + n)), along);
      m.dbeta[i] = L::reduce_add(along) - L::reduce_add(dbeta);
    }
  }
};

}  // namespace monograph
