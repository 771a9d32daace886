// The products of a chunk in fp32. What amx/products.h computes on tiles, under the same names.
#pragma once

#include "monograph/kernels/gated_delta_rule/vector/chunk.h"
#include "monograph/kernels/gated_delta_rule/vector/product.h"

namespace monograph {

template <class V>
struct DeltaVectorProducts {
  using L = Lanes<V>;
  using F32 = typename L::F32;
  using Product = DeltaProduct<V>;
  using Chunk = DeltaChunk<V>;
  static constexpr std::int64_t kMultiple = 16;  // of rows and widths
  static constexpr bool kReadsRows = true;       // q and k in fp32

  // k [key_width, kPairStride], V^ [value_width, kPairStride], S and dS [value_width, key_stride].
  float *k_transposed, *solved_transposed, *state_transposed, *dstate_transposed;

  [[gnu::always_inline]] static DeltaVectorProducts allocate(const DeltaWidths& w, bool backward,
                                                             BumpAllocator& allocator) {
    DeltaVectorProducts p = {};
    p.k_transposed = allocator.take<float>(w.key_width * kPairStride);
    if (!backward) return p;
    p.solved_transposed = allocator.take<float>(w.value_width * kPairStride);
    p.state_transposed = allocator.take<float>(w.value_width * w.key_stride);
    p.dstate_transposed = allocator.take<float>(w.value_width * w.key_stride);
    return p;
  }

  [[gnu::always_inline]] void begin() const {}
  [[gnu::always_inline]] void end() const {}

  // kk and, with `queries`, qk, from q and k; the views are for units that read them.
  [[gnu::noinline]] void multiply_keys(const DeltaWidths& w, const Chunk& c, const HeadsView&,
                                       const HeadsView&, std::int64_t, std::size_t, float,
                                       bool queries) const {
    DeltaTranspose<V>::run(c.k, w.key_stride, c.rows, w.key_width, k_transposed, kPairStride);
    Product::run({c.k, w.key_stride, 1}, k_transposed, kPairStride, c.kk, kPairStride, c.rows,
                 c.rows, w.key_width, 0, DeltaShape::kResults);
    if (queries)
      Product::run({c.q, w.key_stride, 1}, k_transposed, kPairStride, c.qk, kPairStride, c.rows,
                   c.rows, w.key_width, 0, DeltaShape::kResults);
  }

  // out = k S.
  [[gnu::always_inline]] void read_state(const DeltaWidths& w, const Chunk& c, const float* state,
                                         float* out) const {
    Product::run({c.k, w.key_stride, 1}, state, w.value_stride, out, w.value_stride, c.rows,
                 w.value_width, w.key_width, 0);
  }

  // body<kWide>(n) for all columns, kWide vectors from n on at a time: one would wait for its sums.
  template <class Body>
  [[gnu::always_inline]] static void columns(const DeltaWidths& w, const Body& body) {
    constexpr std::size_t kWide = 4;
    std::int64_t n = 0;
    for (; n + static_cast<std::int64_t>(kWide) * L::kLanes <= w.value_width;
         n += static_cast<std::int64_t>(kWide) * L::kLanes)
      body.template operator()<kWide>(n);
    for (; n < w.value_width; n += L::kLanes) body.template operator()<1>(n);
  }
  // out += sum over j < count of factors[j * step] * rows[j].
  template <std::size_t kWide>
  [[gnu::always_inline]] static void add_rows(const float* factors, std::int64_t step,
                                              const float* rows, std::int64_t stride,
                                              std::int64_t count, float* out) {
    F32 sum[kWide];
    const auto at = [](auto v) __attribute__((always_inline)) {
      return static_cast<std::int64_t>(v()) * L::kLanes;
    };
    unrolled<kWide>([&](auto v) __attribute__((always_inline)) { sum[v] = L::load(out + at(v)); });
    for (std::int64_t j = 0; j < count; ++j) {
      const F32 f = L::set(factors[j * step]);
      unrolled<kWide>([&](auto v) __attribute__((always_inline)) {
        sum[v] = L::fma(f, L::load(rows + j * stride + at(v)), sum[v]);
      });
    }
    unrolled<kWide>([&](auto v) __attribute__((always_inline)) { L::store(out + at(v), sum[v]); });
  }

  // solved = (I + L)^-1 solved, forwards in blocks of 16 rows.
  [[gnu::noinline]] void solve(const DeltaWidths& w, const Chunk& c) const {
    for (std::int64_t b = 0; b < c.rows; b += 16) {
      if (b > 0)
        Product::run({c.l + b * kPairStride, kPairStride, 1}, c.solved, w.value_stride,
                     c.solved + b * w.value_stride, w.value_stride, 16, w.value_width, b, 1);
      columns(
          w, [&]<std::size_t kWide>(std::int64_t n) __attribute__((always_inline)) {
            for (std::int64_t i = 1; i < 16; ++i)
              add_rows<kWide>(c.l + (b + i) * kPairStride + b, 1, c.solved + b * w.value_stride + n,
                              w.value_stride, i, c.solved + (b + i) * w.value_stride + n);
          });
    }
  }

  // out = (I + L')^-1 out, backwards.
  [[gnu::noinline]] void solve_transposed(const DeltaWidths& w, const Chunk& c, float* out) const {
    for (std::int64_t b = c.rows - 16; b >= 0; b -= 16) {
      if (b + 16 < c.rows)
        Product::run({c.l + (b + 16) * kPairStride + b, 1, kPairStride},
                     out + (b + 16) * w.value_stride, w.value_stride, out + b * w.value_stride,
                     w.value_stride, 16, w.value_width, c.rows - b - 16, 1);
      columns(
          w, [&]<std::size_t kWide>(std::int64_t n) __attribute__((always_inline)) {
            for (std::int64_t i = 14; i >= 0; --i)
              add_rows<kWide>(c.l + (b + i + 1) * kPairStride + b + i, kPairStride,
                              out + (b + i + 1) * w.value_stride + n, w.value_stride, 15 - i,
                              out + (b + i) * w.value_stride + n);
          });
    }
  }

  // out = e^G q S + P V^, from the state that read_state() saw; `fresh`: it is 0.
  [[gnu::noinline]] void attend(const DeltaWidths& w, const Chunk& c, const float* state,
                                bool fresh, float* out, float) const {
    if (!fresh) {
      Product::run({c.q, w.key_stride, 1}, state, w.value_stride, out, w.value_stride, c.rows,
                   w.value_width, w.key_width, 0);
      c.scale_rows(out, c.from_start, w, out);
    }
    Product::run({c.p, kPairStride, 1}, c.solved, w.value_stride, out, w.value_stride, c.rows,
                 w.value_width, c.rows, fresh ? 0 : 1, DeltaShape::kLower);
  }

  // The state at the chunk's end from that at its start; both may be the same array.
  [[gnu::noinline]] void advance(const DeltaWidths& w, const Chunk& c, const float* from, float* to,
                                 bool fresh) const {
    if (from != to && !fresh)
      __builtin_memcpy(to, from, static_cast<std::size_t>(w.state_floats()) * sizeof(float));
    c.scale_rows(c.solved, c.to_end, w, c.scaled);
    Product::run({c.k, 1, w.key_stride}, c.scaled, w.value_stride, to, w.value_stride, w.key_width,
                 w.value_width, c.rows, fresh ? 0 : c.from_start[c.rows - 1]);
  }

  // out = k dS.
  [[gnu::always_inline]] void read_dstate(const DeltaWidths& w, const Chunk& c, const float* dstate,
                                          float* out) const {
    read_state(w, c, dstate, out);
  }
  // out = V^ dS', of the dS that read_dstate() saw.
  [[gnu::noinline]] void solved_dstate(const DeltaWidths& w, const Chunk& c, const float* dstate,
                                       float* out) const {
    DeltaTranspose<V>::run(dstate, w.value_stride, w.key_width, w.value_width, dstate_transposed,
                           w.key_stride);
    Product::run({c.solved, w.value_stride, 1}, dstate_transposed, w.key_stride, out, w.key_stride,
                 c.rows, w.key_width, w.value_width, 0);
  }
  // out = keep out + P' dout.
  [[gnu::always_inline]] void p_dout(const DeltaWidths& w, const Chunk& c, const float* dout,
                                     float keep, float* out) const {
    Product::run({c.p, 1, kPairStride}, dout, w.value_stride, out, w.value_stride, c.rows,
                 w.value_width, c.rows, keep, DeltaShape::kUpper);
  }
  // ds = dout V^', m = dr V^', both up to the diagonal.
  [[gnu::noinline]] void pairs(const DeltaWidths& w, const Chunk& c, const float* dout,
                               const float* dr, float* ds, float* m) const {
    DeltaTranspose<V>::run(c.solved, w.value_stride, c.rows, w.value_width, solved_transposed,
                           kPairStride);
    for (float* const out : {ds, m})
      Product::run({out == ds ? dout : dr, w.value_stride, 1}, solved_transposed, kPairStride, out,
                   kPairStride, c.rows, c.rows, w.value_width, 0, DeltaShape::kResults);
  }
  // out = e^G dout S', dk += dks S', of the S that read_state() saw.
  [[gnu::noinline]] void state_gradients(const DeltaWidths& w, const Chunk& c, const float* state,
                                         const float* dout_scaled, const float* dks, float* out,
                                         float* dk) const {
    DeltaTranspose<V>::run(state, w.value_stride, w.key_width, w.value_width, state_transposed,
                           w.key_stride);
    Product::run({dout_scaled, w.value_stride, 1}, state_transposed, w.key_stride, out,
                 w.key_stride, c.rows, w.key_width, w.value_width, 0);
    Product::run({dks, w.value_stride, 1}, state_transposed, w.key_stride, dk, w.key_stride, c.rows,
                 w.key_width, w.value_width, 1);
  }
  // dq += ds k, dk += ds' q + m k + m' k.
  [[gnu::noinline]] void pair_gradients(const DeltaWidths& w, const Chunk& c, const float* ds,
                                        const float* m, float* dq, float* dk, float) const {
    const auto add = [&](const float* left, const float* right, float* to, bool transposed)
        __attribute__((always_inline)) {
      const DeltaLeft a =
          transposed ? DeltaLeft{left, 1, kPairStride} : DeltaLeft{left, kPairStride, 1};
      Product::run(a, right, w.key_stride, to, w.key_stride, c.rows, w.key_width, c.rows, 1,
                   transposed ? DeltaShape::kUpper : DeltaShape::kLower);
    };
    add(ds, c.k, dq, false);
    add(ds, c.q, dk, true);
    add(m, c.k, dk, false);
    add(m, c.k, dk, true);
  }
  // dS at the chunk's start, in place. `ended`: it is 0 at the end.
  [[gnu::noinline]] void step_back(const DeltaWidths& w, const Chunk& c, const float* dout_scaled,
                                   const float* dks, bool ended, float* dstate, float) const {
    Product::run({c.q, 1, w.key_stride}, dout_scaled, w.value_stride, dstate, w.value_stride,
                 w.key_width, w.value_width, c.rows, ended ? 0 : c.from_start[c.rows - 1]);
    Product::run({c.k, 1, w.key_stride}, dks, w.value_stride, dstate, w.value_stride, w.key_width,
                 w.value_width, c.rows, 1);
  }
};

}  // namespace monograph
