// A chunk of a document in fp32 on any vector vocabulary V: what forward and backward share.
// Rows are padded to a multiple of 16 with tokens that change nothing (q = k = v = beta = g = 0),
// widths with zeros; a stride is 16 floats longer than its row, because rows of a power of two
// would fall into few sets of the L1 cache.
#pragma once

#include "monograph/cpu/carver.h"
#include "monograph/kernels/gated_delta_rule/unit.h"
#include "monograph/kernels/gated_delta_rule/vector/product.h"
#include "monograph/kernels/varlen_attention/vector/rows.h"

namespace monograph {

inline constexpr std::int64_t kPairStride = kChunk + 16;  // of arrays [rows, rows]

struct DeltaWidths {
  std::int64_t key, value, key_width, value_width, key_stride, value_stride;

  [[gnu::always_inline]] explicit DeltaWidths(const DeltaRuleProblem& p)
      : key(static_cast<std::int64_t>(p.key_size)),
        value(static_cast<std::int64_t>(p.value_size)),
        key_width(padded(p.key_size)),
        value_width(padded(p.value_size)),
        key_stride(key_width + 16),
        value_stride(value_width + 16) {}
  [[gnu::always_inline]] std::int64_t state_floats() const { return key_width * value_stride; }
};

template <class V>
struct DeltaChunk {
  using L = Lanes<V>;
  using F32 = typename L::F32;
  using Product = DeltaProduct<V>;

  // Of a key head: q scale / |q| and k / |k| [rows, key_stride], k transposed, their products, and
  // the factors 1 / |q|, 1 / |k|.
  float *q, *k, *k_transposed, *kk, *qk, *q_factor, *k_factor;
  // Of a value head: the value, e^G k S, V^; e^(G[i] - G[j]) and the two matrices made with it,
  // the lower one of `out` and the strictly lower one of the solve, negated.
  float *v, *ks, *solved, *scaled, *decay, *p, *l;
  // A number per token: beta, G / ln 2 in two parts, e^G, e^(G[last] - G).
  float *beta, *high, *low, *from_start, *to_end;
  std::int64_t tokens, rows;

  [[gnu::always_inline]] static DeltaChunk carve(const DeltaWidths& w, Carver& carver) {
    DeltaChunk c;
    for (float** const at : {&c.q, &c.k}) *at = carver.take<float>(kChunk * w.key_stride);
    c.k_transposed = carver.take<float>(w.key_width * kPairStride);
    for (float** const at : {&c.v, &c.ks, &c.solved, &c.scaled})
      *at = carver.take<float>(kChunk * w.value_stride);
    for (float** const at : {&c.kk, &c.qk, &c.decay, &c.p, &c.l})
      *at = carver.take<float>(kChunk * kPairStride);
    for (float** const at :
         {&c.q_factor, &c.k_factor, &c.beta, &c.high, &c.low, &c.from_start, &c.to_end})
      *at = carver.take<float>(kChunk);
    c.tokens = c.rows = 0;
    return c;
  }

  [[gnu::always_inline]] void resize(std::int64_t count) {
    tokens = count;
    rows = (count + 15) / 16 * 16;
  }

  // Rows of a head to fp32, each times its factor: 1 / sqrt(sum x^2 + 1e-6) and `scale`.
  template <class T>
  [[gnu::noinline]] void load_normed(const HeadsView& view, std::int64_t token, std::size_t head,
                                     std::int64_t size, std::int64_t width, std::int64_t stride,
                                     bool l2norm, float scale, float* factors, float* out) const {
    for (std::int64_t r = 0; r < tokens; ++r) {
      float* const row = out + r * stride;
      widen_row<V>(row_of<T>(view, token + r, head), size, width, row);
      float factor = 1;
      if (l2norm) factor = 1 / __builtin_sqrtf(dot(row, row, width) + 1e-6f);
      factors[r] = factor;
      const F32 f = L::set(factor * scale);
      for (std::int64_t i = 0; i < width; i += L::kLanes)
        L::store(row + i, L::mul(L::load(row + i), f));
    }
    clear_rows(out, stride, width);
  }
  template <class T>
  [[gnu::noinline]] void load_rows(const HeadsView& view, std::int64_t token, std::size_t head,
                                   std::int64_t size, std::int64_t width, std::int64_t stride,
                                   float* out) const {
    for (std::int64_t r = 0; r < tokens; ++r)
      widen_row<V>(row_of<T>(view, token + r, head), size, width, out + r * stride);
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

  // q and k are loaded.
  [[gnu::always_inline]] void multiply_keys(const DeltaWidths& w) const {
    DeltaTranspose<V>::run(k, w.key_stride, rows, w.key_width, k_transposed, kPairStride);
    for (float* const out : {kk, qk})
      Product::run({out == kk ? k : q, w.key_stride, 1}, k_transposed, kPairStride, out,
                   kPairStride, rows, rows, w.key_width, 0, DeltaShape::kResults);
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
                                    std::size_t head) const {
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
    decays();
  }

  // Whole vectors of the rows up to the diagonal; zero beyond it.
  void decays() const {
    for (std::int64_t i = 0; i < rows; ++i) {
      const F32 h = L::set(high[i]), l0 = L::set(low[i]), minus_beta = L::set(-beta[i]);
      float *const d = decay + i * kPairStride, *const pi = p + i * kPairStride,
                   *const li = l + i * kPairStride;
      const std::int64_t end = (i + 16) / 16 * 16;
      for (std::int64_t j = 0; j < end; j += L::kLanes) {
        const F32 x = L::add(L::sub(h, L::load(high + j)), L::sub(l0, L::load(low + j)));
        const F32 e = exp2_of<V>(x);
        L::store(d + j, e);
        L::store(pi + j, L::mul(e, L::load(qk + i * kPairStride + j)));
        L::store(li + j, L::mul(L::mul(e, minus_beta), L::load(kk + i * kPairStride + j)));
      }
      for (std::int64_t j = i + 1; j < end; ++j) d[j] = pi[j] = li[j] = 0;
      li[i] = 0;
    }
  }

  // solved = (I + L)^-1 solved, forwards in blocks of 16 rows.
  [[gnu::noinline]] void solve(const DeltaWidths& w) const {
    for (std::int64_t b = 0; b < rows; b += 16) {
      if (b > 0)
        Product::run({l + b * kPairStride, kPairStride, 1}, solved, w.value_stride,
                     solved + b * w.value_stride, w.value_stride, 16, w.value_width, b, 1);
      for (std::int64_t n = 0; n < w.value_width; n += L::kLanes)
        for (std::int64_t i = 1; i < 16; ++i) {
          float* const at = solved + (b + i) * w.value_stride + n;
          F32 sum = L::load(at);
          for (std::int64_t j = 0; j < i; ++j)
            sum = L::fma(L::set(l[(b + i) * kPairStride + b + j]),
                         L::load(solved + (b + j) * w.value_stride + n), sum);
          L::store(at, sum);
        }
    }
  }

  // out = (I + L')^-1 out, backwards.
  [[gnu::noinline]] void solve_transposed(const DeltaWidths& w, float* out) const {
    for (std::int64_t b = rows - 16; b >= 0; b -= 16) {
      if (b + 16 < rows)
        Product::run({l + (b + 16) * kPairStride + b, 1, kPairStride},
                     out + (b + 16) * w.value_stride, w.value_stride, out + b * w.value_stride,
                     w.value_stride, 16, w.value_width, rows - b - 16, 1);
      for (std::int64_t n = 0; n < w.value_width; n += L::kLanes)
        for (std::int64_t i = 14; i >= 0; --i) {
          float* const at = out + (b + i) * w.value_stride + n;
          F32 sum = L::load(at);
          for (std::int64_t j = i + 1; j < 16; ++j)
            sum = L::fma(L::set(l[(b + j) * kPairStride + b + i]),
                         L::load(out + (b + j) * w.value_stride + n), sum);
          L::store(at, sum);
        }
    }
  }

  // From v and the state at the chunk's start: ks, then solved = V^. `fresh`: the state is 0 and
  // not read.
  [[gnu::noinline]] void values(const DeltaWidths& w, const float* state, bool fresh) const {
    if (!fresh)
      Product::run({k, w.key_stride, 1}, state, w.value_stride, ks, w.value_stride, rows,
                   w.value_width, w.key_width, 0);
    for (std::int64_t r = 0; r < rows; ++r) {
      const F32 e = L::set(-from_start[r]), b = L::set(beta[r]);
      for (std::int64_t i = r * w.value_stride; i < r * w.value_stride + w.value_width;
           i += L::kLanes) {
        if (fresh) L::store(ks + i, L::set(0.f));
        L::store(solved + i, L::mul(b, L::fma(e, L::load(ks + i), L::load(v + i))));
      }
    }
    solve(w);
  }

  // The state at the chunk's end, in place.
  [[gnu::noinline]] void advance(const DeltaWidths& w, float* state, bool fresh) const {
    scale_rows(solved, to_end, w, scaled);
    Product::run({k, 1, w.key_stride}, scaled, w.value_stride, state, w.value_stride, w.key_width,
                 w.value_width, rows, fresh ? 0 : from_start[rows - 1]);
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
