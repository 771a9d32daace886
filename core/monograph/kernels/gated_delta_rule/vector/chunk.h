// A chunk of a document in fp32 on any vector vocabulary V: what forward and backward share.
// Rows are padded to a multiple of 16 or 32 with tokens that change nothing (q = k = v = beta = g =
// 0), widths with zeros; a stride is 16 floats longer than its row, because rows of a power of two
// would fall into few sets of the L1 cache.
#pragma once

#include "monograph/cpu/bump_allocator.h"
#include "monograph/kernels/gated_delta_rule/unit.h"
#include "monograph/kernels/varlen_attention/vector/rows.h"

namespace monograph {

inline constexpr std::int64_t kPairStride = kChunk + 16;  // of arrays [rows, rows]

struct DeltaWidths {
  std::int64_t key, value, key_width, value_width, key_stride, value_stride;

  [[gnu::always_inline]] DeltaWidths(const DeltaRuleProblem& p, std::int64_t multiple)
      : key(static_cast<std::int64_t>(p.key_size)),
        value(static_cast<std::int64_t>(p.value_size)),
        key_width((key + multiple - 1) / multiple * multiple),
        value_width((value + multiple - 1) / multiple * multiple),
        key_stride(key_width + 16),
        value_stride(value_width + 16) {}
  [[gnu::always_inline]] std::int64_t state_floats() const { return key_width * value_stride; }
};

template <class V>
struct DeltaChunk {
  using L = Lanes<V>;
  using F32 = typename L::F32;

  // Of a key head: q scale / |q| and k / |k| [rows, key_stride], their products, and the factors
  // 1 / |q|, 1 / |k|.
  float *q, *k, *kk, *qk, *q_factor, *k_factor;
  // Of a value head: the value, e^G k S, V^; e^(G[i] - G[j]) and the two matrices made with it,
  // the lower one of `out` and the strictly lower one of the solve, negated.
  float *v, *ks, *solved, *scaled, *decay, *p, *l;
  // A number per token: beta, G / ln 2 in two parts, e^G, e^(G[last] - G).
  float *beta, *high, *low, *from_start, *to_end;
  std::int64_t tokens, rows;

  [[gnu::always_inline]] static DeltaChunk allocate(const DeltaWidths& w,
                                                    BumpAllocator& allocator) {
    DeltaChunk c;
    for (float** const at : {&c.q, &c.k}) *at = allocator.take<float>(kChunk * w.key_stride);
    for (float** const at : {&c.v, &c.ks, &c.solved, &c.scaled})
      *at = allocator.take<float>(kChunk * w.value_stride);
    for (float** const at : {&c.kk, &c.qk, &c.decay, &c.p, &c.l})
      *at = allocator.take<float>(kChunk * kPairStride);
    for (float** const at :
         {&c.q_factor, &c.k_factor, &c.beta, &c.high, &c.low, &c.from_start, &c.to_end})
      *at = allocator.take<float>(kChunk);
    c.tokens = c.rows = 0;
    return c;
  }

  [[gnu::always_inline]] void resize(std::int64_t count, std::int64_t multiple) {
    tokens = count;
    rows = (count + multiple - 1) / multiple * multiple;
  }

  // A token's heads fill a page or more, so the hardware sees no pattern in one head. Addresses
  // beyond the tensor do no harm.
  static constexpr std::int64_t kAhead = 12;
  template <class T>
  [[gnu::always_inline]] static void prefetch_row(const HeadsView& view, std::int64_t token,
                                                  std::size_t head, std::int64_t size) {
    const char* const row = reinterpret_cast<const char*>(row_of<T>(view, token, head));
    for (std::int64_t i = 0; i < size * static_cast<std::int64_t>(sizeof(T)); i += 64)
      __builtin_prefetch(row + i);
  }

  // Rows of a head to fp32, each times its factor: 1 / sqrt(sum x^2 + 1e-6) and `scale`.
  template <class T>
  [[gnu::noinline]] void load_normed(const HeadsView& view, std::int64_t token, std::size_t head,
                                     std::int64_t size, std::int64_t width, std::int64_t stride,
                                     bool l2norm, float scale, float* factors, float* out) const {
    for (std::int64_t r = 0; r < tokens; ++r) {
      float* const row = out + r * stride;
      prefetch_row<T>(view, token + r + kAhead, head, size);
      widen_row<V>(row_of<T>(view, token + r, head), size, width, row);
      float factor = 1;
      if (l2norm) factor = 1 / __builtin_sqrtf(dot(row, row, width) + 1e-6f);
      factors[r] = factor;
      const F32 f = L::set(factor * scale);
      for (std::int64_t i = 0; i < width; i += L::kLanes)
        L::store(row + i, L::mul(L::load(row + i), f));
    }
    for (std::int64_t r = tokens; r < rows; ++r) factors[r] = 0;
    clear_rows(out, stride, width);
  }
  // The factors alone.
  template <class T>
  [[gnu::noinline]] void load_norms(const HeadsView& view, std::int64_t token, std::size_t head,
                                    std::int64_t size, bool l2norm, float* factors) const {
    for (std::int64_t r = 0; r < tokens; ++r) {
      prefetch_row<T>(view, token + r + kAhead, head, size);
      const T* const row = row_of<T>(view, token + r, head);
      F32 sum = L::set(0.f);
      std::int64_t i = 0;
      for (; i + L::kLanes <= size; i += L::kLanes) {
        const F32 x = L::load_as(row + i);
        sum = L::fma(x, x, sum);
      }
      float rest[L::kLanes] = {};
      for (std::int64_t n = 0; i < size; ++i, ++n) rest[n] = to_float(row[i]);
      sum = L::fma(L::load(rest), L::load(rest), sum);
      factors[r] = l2norm ? 1 / __builtin_sqrtf(L::reduce_add(sum) + 1e-6f) : 1;
    }
    for (std::int64_t r = tokens; r < rows; ++r) factors[r] = 0;
  }
  template <class T>
  [[gnu::noinline]] void load_rows(const HeadsView& view, std::int64_t token, std::size_t head,
                                   std::int64_t size, std::int64_t width, std::int64_t stride,
                                   float* out) const {
    for (std::int64_t r = 0; r < tokens; ++r) {
      prefetch_row<T>(view, token + r + kAhead, head, size);
      widen_row<V>(row_of<T>(view, token + r, head), size, width, out + r * stride);
    }
    clear_rows(out, stride, width);
  }
  [[gnu::always_inline]] void clear_rows(float* out, std::int64_t stride,
                                         std::int64_t width) const {
    for (std::int64_t r = tokens; r < rows; ++r) clear_floats<V>(out + r * stride, width);
  }

  [[gnu::always_inline]] static float dot(const float* a, const float* b, std::int64_t width) {
    F32 sum = L::set(0.f);
    for (std::int64_t i = 0; i < width; i += L::kLanes)
      sum = L::fma(L::load(a + i), L::load(b + i), sum);
    return L::reduce_add(sum);
  }

  template <class T>
  [[gnu::always_inline]] static float gate(const GateView& view, std::int64_t token,
                                           std::size_t head) {
    const std::ptrdiff_t at =
        token * view.token_stride + static_cast<std::ptrdiff_t>(head) * view.head_stride;
    if (view.dtype == DType::kFloat32) return static_cast<const float*>(view.data)[at];
    return to_float(static_cast<const T*>(view.data)[at]);
  }

  template <class T>
  [[gnu::noinline]] void load_gates(const GateView& g, const GateView& betas, std::int64_t token,
                                    std::size_t head, bool queries) const {
    constexpr double kLog2EDouble = 1.4426950408889634;
    double sum = 0;
    for (std::int64_t r = 0; r < rows; ++r) {
      beta[r] = r < tokens ? gate<T>(betas, token + r, head) : 0;
      const float x = r < tokens ? gate<T>(g, token + r, head) : 0;
      sum += x < kLeastDecay ? kLeastDecay : x;
      high[r] = static_cast<float>(sum * kLog2EDouble);
      low[r] = static_cast<float>(sum * kLog2EDouble - static_cast<double>(high[r]));
    }
    const F32 last = L::set(high[rows - 1]), last_low = L::set(low[rows - 1]);
    for (std::int64_t r = 0; r < rows; r += L::kLanes) {
      const F32 h = L::load(high + r), l0 = L::load(low + r);
      L::store(from_start + r, exp2_of<V>(h));
      L::store(to_end + r, exp2_of<V>(L::add(L::sub(last, h), L::sub(last_low, l0))));
    }
    decays(queries);
  }

  // Whole vectors of the rows up to the diagonal; zero beyond it. p only with `queries`.
  void decays(bool queries) const {
    for (std::int64_t i = 0; i < rows; ++i) {
      const F32 h = L::set(high[i]), l0 = L::set(low[i]), minus_beta = L::set(-beta[i]);
      float *const d = decay + i * kPairStride, *const pi = p + i * kPairStride,
                   *const li = l + i * kPairStride;
      const std::int64_t end = (i + 16) / 16 * 16;
      for (std::int64_t j = 0; j < end; j += L::kLanes) {
        const F32 x = L::add(L::sub(h, L::load(high + j)), L::sub(l0, L::load(low + j)));
        const F32 e = exp2_of<V>(x);
        L::store(d + j, e);
        if (queries) L::store(pi + j, L::mul(e, L::load(qk + i * kPairStride + j)));
        L::store(li + j, L::mul(L::mul(e, minus_beta), L::load(kk + i * kPairStride + j)));
      }
      for (std::int64_t j = i + 1; j < end; ++j) d[j] = pi[j] = li[j] = 0;
      li[i] = 0;
    }
  }

  // From v and the state at the chunk's start: ks, then solved = V^. `fresh`: the state is 0 and
  // not read.
  template <class Products>
  [[gnu::noinline]] void values(const DeltaWidths& w, const Products& products, const float* state,
                                bool fresh) const {
    if (!fresh) products.read_state(w, *this, state, ks);
    for (std::int64_t r = 0; r < rows; ++r) {
      const F32 e = L::set(-from_start[r]), b = L::set(beta[r]);
      for (std::int64_t i = r * w.value_stride; i < r * w.value_stride + w.value_width;
           i += L::kLanes) {
        if (fresh) L::store(ks + i, L::set(0.f));
        L::store(solved + i, L::mul(b, L::fma(e, L::load(ks + i), L::load(v + i))));
      }
    }
    products.solve(w, *this);
  }

  // out[r] = factor[r] in[r].
  [[gnu::always_inline]] void scale_rows(const float* in, const float* factor, const DeltaWidths& w,
                                         float* out) const {
    for (std::int64_t r = 0; r < rows; ++r) {
      const F32 f = L::set(factor[r]);
      for (std::int64_t i = r * w.value_stride; i < r * w.value_stride + w.value_width;
           i += L::kLanes)
        L::store(out + i, L::mul(f, L::load(in + i)));
    }
  }
};

// A state between the caller's array and the padded one.
template <class V>
[[gnu::always_inline]] inline void load_state(const DeltaWidths& w, const float* from, float* to) {
  for (std::int64_t r = 0; r < w.key_width; ++r) {
    if (from == nullptr || r >= w.key)
      clear_floats<V>(to + r * w.value_stride, w.value_width);
    else
      widen_row<V>(from + r * w.value, w.value, w.value_width, to + r * w.value_stride);
  }
}
template <class V>
[[gnu::always_inline]] inline void store_state(const DeltaWidths& w, const float* from, float* to) {
  for (std::int64_t r = 0; r < w.key; ++r)
    narrow_row<V>(from + r * w.value_stride, 1, w.value, to + r * w.value);
}

}  // namespace monograph
