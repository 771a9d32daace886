// The products of a chunk on tiles, bf16 operands and fp32 sums. q, k and dout enter as they are
// and their norms as fp32 factors of rows. Split into two bf16, without the product of the two
// rests: the inverse and P with what they are multiplied with, what is added to S (errors
// there stay for the rest of the document: with beta near 2 they were 5e-3 of a state after 200
// tokens, and are 1e-3), V^ and dR in the pairs. The rest is rounded once. Included by amx.cpp
// only.
#pragma once

#include "monograph/kernels/gated_delta_rule/amx/inverse.h"
#include "monograph/kernels/gated_delta_rule/amx/pack.h"
#include "monograph/kernels/gated_delta_rule/vector/chunk.h"

namespace monograph {
namespace {

struct DeltaTileProducts {
  using Chunk = DeltaChunk<simd::Amx>;
  static constexpr std::int64_t kMultiple = 32;  // of rows and widths
  static constexpr bool kReadsRows = false;      // q and k in fp32

  bool backward;
  Bf16 *q_rows, *q_pairs, *q_transposed, *k_rows, *k_columns, *k_pairs, *k_transposed;
  Bf16 *state, *pair_high, *pair_low;                      // the operand of the moment
  Bf16 *value_high, *value_low, *dout_rows, *dr, *dr_low;  // [rows, value_width]
  float* inverse;                                          // [kChunk, kPairStride]

  [[gnu::always_inline]] static DeltaTileProducts allocate(const DeltaWidths& w, bool backward,
                                                           BumpAllocator& allocator) {
    DeltaTileProducts p = {};
    p.backward = backward;
    for (Bf16** const at : {&p.q_rows, &p.k_rows, &p.k_columns, &p.k_transposed})
      *at = allocator.take<Bf16>(kChunk * w.key_width);
    p.state = allocator.take<Bf16>(w.key_width * w.value_width);
    for (Bf16** const at : {&p.pair_high, &p.pair_low}) *at = allocator.take<Bf16>(kChunk * kChunk);
    for (Bf16** const at : {&p.value_high, &p.value_low})
      *at = allocator.take<Bf16>(kChunk * w.value_width);
    p.inverse = allocator.take<float>(kChunk * kPairStride);
    if (!backward) return p;
    for (Bf16** const at : {&p.q_pairs, &p.q_transposed, &p.k_pairs})
      *at = allocator.take<Bf16>(kChunk * w.key_width);
    for (Bf16** const at : {&p.dout_rows, &p.dr, &p.dr_low})
      *at = allocator.take<Bf16>(kChunk * w.value_width);
    return p;
  }

  [[gnu::always_inline]] void begin() const { simd::Amx::configure(); }
  [[gnu::always_inline]] void end() const { simd::Amx::release(); }

  // Numbers of a row-major array, each row times its factor.
  [[gnu::always_inline]] static auto scaled(const float* x, std::int64_t stride,
                                            const float* factors) {
    return [=](std::int64_t row, std::int64_t column) __attribute__((always_inline)) {
      return _mm512_mul_ps(_mm512_set1_ps(factors[row]), _mm512_load_ps(x + row * stride + column));
    };
  }
  [[gnu::always_inline]] static auto plain(const float* x, std::int64_t stride) {
    return [=](std::int64_t row, std::int64_t column) __attribute__((always_inline)) {
      return _mm512_load_ps(x + row * stride + column);
    };
  }
  // Of a lower triangle of pairs, rows and columns times their factors.
  [[gnu::always_inline]] static auto lower(const float* x, const float* row_factors = nullptr,
                                           const float* column_factors = nullptr) {
    return [=](std::int64_t row, std::int64_t column) __attribute__((always_inline)) {
      if (column > row) return _mm512_setzero_ps();
      __m512 v = _mm512_load_ps(x + row * kPairStride + column);
      if (row_factors != nullptr) v = _mm512_mul_ps(v, _mm512_set1_ps(row_factors[row]));
      if (column_factors != nullptr) v = _mm512_mul_ps(v, _mm512_load_ps(column_factors + column));
      return v;
    };
  }
  // out = factor a b, of tokens.
  [[gnu::always_inline]] static void multiply_factors(const Chunk& c, const float* a,
                                                      const float* b, float factor, float* out) {
    for (std::int64_t r = 0; r < c.rows; ++r) out[r] = factor * a[r] * b[r];
  }

  // A strip of 32 rows of a bf16 tensor that holds `c.tokens` tokens from `token` on.
  [[gnu::always_inline]] static Rows strip(const HeadsView& view, const Chunk& c,
                                           std::int64_t token, std::size_t head, std::int64_t s,
                                           std::int64_t size) {
    return {row_of<Bf16>(view, token + s, head), view.token_stride, c.tokens - s, size};
  }

  // kk and qk from the tensors themselves.
  [[gnu::noinline]] void multiply_keys(const DeltaWidths& w, const Chunk& c, const HeadsView& q,
                                       const HeadsView& k, std::int64_t token, std::size_t head,
                                       float scale, bool queries) const {
    const std::int64_t across = w.key_width / 32, down = c.rows / 32;
    Square square;
    for (std::int64_t s = 0; s < down; ++s)
      for (std::int64_t e = 0; e < across; ++e) {
        const std::int64_t row = (s * across + e) * kSquare, panel = (e * down + s) * kSquare;
        if (queries) {
          load_square(strip(q, c, token, head, 32 * s, w.key), 32 * e, square);
          put_rows(square, q_rows + row);
        }
        if (queries && backward) {
          put_token_pairs(square, q_pairs + panel);
          put_transposed(square, q_transposed + panel);
        }
        load_square(strip(k, c, token, head, 32 * s, w.key), 32 * e, square);
        put_rows(square, k_rows + row);
        put_columns(square, k_columns + row);
        put_transposed(square, k_transposed + panel);
        if (queries && backward) put_token_pairs(square, k_pairs + panel);
      }
    multiply_terms<1>({{k_rows, k_columns}}, down, down, across, c.kk, kPairStride, false,
                      DeltaShape::kResults);
    if (queries)
      multiply_terms<1>({{q_rows, k_columns}}, down, down, across, c.qk, kPairStride, false,
                        DeltaShape::kResults);
    for (std::int64_t i = 0; i < c.rows; ++i) {
      const __m512 k_row = _mm512_set1_ps(c.k_factor[i]),
                   q_row = _mm512_set1_ps(queries ? c.q_factor[i] * scale : 0);
      for (std::int64_t at = i * kPairStride, j = 0; j <= i; j += 16) {
        const __m512 column = _mm512_load_ps(c.k_factor + j);
        float *const kk = c.kk + at + j, *const qk = c.qk + at + j;
        _mm512_store_ps(kk, _mm512_mul_ps(_mm512_mul_ps(k_row, column), _mm512_load_ps(kk)));
        if (queries)
          _mm512_store_ps(qk, _mm512_mul_ps(_mm512_mul_ps(q_row, column), _mm512_load_ps(qk)));
      }
    }
  }

  [[gnu::noinline]] void read_state(const DeltaWidths& w, const Chunk& c, const float* from,
                                    float* out) const {
    pack<Layout::kPairs, false>(w.key_width, w.value_width, plain(from, w.value_stride), state);
    multiply_terms<1>({{k_rows, state}}, c.rows / 32, w.value_width / 32, w.key_width / 32, out,
                      w.value_stride, false);
    c.scale_rows(out, c.k_factor, w, out);
  }

  [[gnu::noinline]] void solve(const DeltaWidths& w, const Chunk& c) const {
    invert_lower(c.l, c.rows, inverse);
    pack<Layout::kRows, true>(c.rows, c.rows, lower(inverse), pair_high, pair_low);
    multiply_split(w, c, c.solved, c.solved, false, DeltaShape::kLower);
  }
  [[gnu::noinline]] void solve_transposed(const DeltaWidths& w, const Chunk& c, float* out) const {
    pack<Layout::kTransposed, true>(c.rows, c.rows, lower(inverse), pair_high, pair_low);
    multiply_split(w, c, out, out, false, DeltaShape::kUpper);
  }
  // out = keep out + the packed pairs times x, both split.
  [[gnu::always_inline]] void multiply_split(const DeltaWidths& w, const Chunk& c, const float* x,
                                             float* out, bool keep, DeltaShape shape) const {
    pack<Layout::kPairs, true>(c.rows, w.value_width, plain(x, w.value_stride), value_high,
                               value_low);
    multiply_terms<3>({{pair_high, value_high}, {pair_high, value_low}, {pair_low, value_high}},
                      c.rows / 32, w.value_width / 32, c.rows / 32, out, w.value_stride, keep,
                      shape);
  }

  [[gnu::noinline]] void attend(const DeltaWidths& w, const Chunk& c, const float*, bool fresh,
                                float* out, float scale) const {
    if (!fresh) {
      alignas(64) float factors[kChunk];
      multiply_factors(c, c.q_factor, c.from_start, scale, factors);
      multiply_terms<1>({{q_rows, state}}, c.rows / 32, w.value_width / 32, w.key_width / 32, out,
                        w.value_stride, false);
      c.scale_rows(out, factors, w, out);
    }
    pack<Layout::kRows, true>(c.rows, c.rows, lower(c.p), pair_high, pair_low);
    multiply_split(w, c, c.solved, out, !fresh, DeltaShape::kLower);
  }

  [[gnu::noinline]] void advance(const DeltaWidths& w, const Chunk& c, const float* from, float* to,
                                 bool fresh) const {
    alignas(64) float factors[kChunk];
    multiply_factors(c, c.to_end, c.k_factor, 1, factors);
    pack<Layout::kPairs, true>(c.rows, w.value_width, scaled(c.solved, w.value_stride, factors),
                               value_high, value_low);
    if (!fresh) decay_state(w, c, from, to);
    multiply_terms<2>({{k_transposed, value_high}, {k_transposed, value_low}}, w.key_width / 32,
                      w.value_width / 32, c.rows / 32, to, w.value_stride, !fresh);
  }
  [[gnu::always_inline]] static void decay_state(const DeltaWidths& w, const Chunk& c,
                                                 const float* from, float* to) {
    const __m512 e = _mm512_set1_ps(c.from_start[c.rows - 1]);
    for (std::int64_t r = 0; r < w.key_width; ++r)
      for (std::int64_t i = r * w.value_stride; i < r * w.value_stride + w.value_width; i += 16)
        _mm512_store_ps(to + i, _mm512_mul_ps(e, _mm512_load_ps(from + i)));
  }

  [[gnu::always_inline]] void read_dstate(const DeltaWidths& w, const Chunk& c, const float* dstate,
                                          float* out) const {
    read_state(w, c, dstate, out);
  }
  [[gnu::noinline]] void solved_dstate(const DeltaWidths& w, const Chunk& c, const float* dstate,
                                       float* out) const {
    pack<Layout::kColumns, false>(w.key_width, w.value_width, plain(dstate, w.value_stride), state);
    pack<Layout::kRows, false>(c.rows, w.value_width, plain(c.solved, w.value_stride), value_high);
    multiply_terms<1>({{value_high, state}}, c.rows / 32, w.key_width / 32, w.value_width / 32, out,
                      w.key_stride, false);
  }
  [[gnu::noinline]] void p_dout(const DeltaWidths& w, const Chunk& c, const float* dout, float keep,
                                float* out) const {
    pack<Layout::kTransposed, true>(c.rows, c.rows, lower(c.p), pair_high, pair_low);
    pack<Layout::kPairs, false>(c.rows, w.value_width, plain(dout, w.value_stride), value_high);
    multiply_terms<2>({{pair_high, value_high}, {pair_low, value_high}}, c.rows / 32,
                      w.value_width / 32, c.rows / 32, out, w.value_stride, keep != 0,
                      DeltaShape::kUpper);
  }
  [[gnu::noinline]] void pairs(const DeltaWidths& w, const Chunk& c, const float* dout,
                               const float* dr_rows, float* ds, float* m) const {
    const std::int64_t down = c.rows / 32, across = w.value_width / 32;
    pack<Layout::kColumns, true>(c.rows, w.value_width, plain(c.solved, w.value_stride), value_high,
                                 value_low);
    pack<Layout::kRows, false>(c.rows, w.value_width, plain(dout, w.value_stride), dout_rows);
    pack<Layout::kRows, true>(c.rows, w.value_width, plain(dr_rows, w.value_stride), dr, dr_low);
    multiply_terms<2>({{dout_rows, value_high}, {dout_rows, value_low}}, down, down, across, ds,
                      kPairStride, false, DeltaShape::kResults);
    multiply_terms<3>({{dr, value_high}, {dr, value_low}, {dr_low, value_high}}, down, down, across,
                      m, kPairStride, false, DeltaShape::kResults);
  }
  [[gnu::noinline]] void state_gradients(const DeltaWidths& w, const Chunk& c, const float* from,
                                         const float*, const float* dks, float* out,
                                         float* dk) const {
    const std::int64_t down = c.rows / 32, across = w.value_width / 32;
    pack<Layout::kColumns, false>(w.key_width, w.value_width, plain(from, w.value_stride), state);
    multiply_terms<1>({{dout_rows, state}}, down, w.key_width / 32, across, out, w.key_stride,
                      false);
    for (std::int64_t r = 0; r < c.rows; ++r) {
      const __m512 e = _mm512_set1_ps(c.from_start[r]);
      for (std::int64_t i = r * w.key_stride; i < r * w.key_stride + w.key_width; i += 16)
        _mm512_store_ps(out + i, _mm512_mul_ps(e, _mm512_load_ps(out + i)));
    }
    pack<Layout::kRows, false>(c.rows, w.value_width, plain(dks, w.value_stride), dr);
    multiply_terms<1>({{dr, state}}, down, w.key_width / 32, across, dk, w.key_stride, true);
  }
  [[gnu::noinline]] void pair_gradients(const DeltaWidths& w, const Chunk& c, const float* ds,
                                        const float* m, float* dq, float* dk, float scale) const {
    const std::int64_t down = c.rows / 32, across = w.key_width / 32;
    alignas(64) float factors[kChunk];
    for (std::int64_t r = 0; r < c.rows; ++r) factors[r] = scale * c.q_factor[r];
    const auto add = [&](const Bf16* right, float* to, DeltaShape shape)
        __attribute__((always_inline)) {
      multiply_terms<1>({{pair_high, right}}, down, across, down, to, w.key_stride, true, shape);
    };
    pack<Layout::kRows, false>(c.rows, c.rows, lower(ds, nullptr, c.k_factor), pair_high);
    add(k_pairs, dq, DeltaShape::kLower);
    pack<Layout::kTransposed, false>(c.rows, c.rows, lower(ds, factors), pair_high);
    add(q_pairs, dk, DeltaShape::kUpper);
    pack<Layout::kRows, false>(c.rows, c.rows, lower(m, nullptr, c.k_factor), pair_high);
    add(k_pairs, dk, DeltaShape::kLower);
    pack<Layout::kTransposed, false>(c.rows, c.rows, lower(m, c.k_factor), pair_high);
    add(k_pairs, dk, DeltaShape::kUpper);
  }
  [[gnu::noinline]] void step_back(const DeltaWidths& w, const Chunk& c, const float* dout_scaled,
                                   const float* dks, bool ended, float* dstate, float scale) const {
    alignas(64) float factors[kChunk];
    for (std::int64_t r = 0; r < c.rows; ++r) factors[r] = scale * c.q_factor[r];
    pack<Layout::kPairs, false>(c.rows, w.value_width, scaled(dout_scaled, w.value_stride, factors),
                                value_high);
    pack<Layout::kPairs, false>(c.rows, w.value_width, scaled(dks, w.value_stride, c.k_factor),
                                value_low);
    if (!ended) decay_state(w, c, dstate, dstate);
    multiply_terms<2>({{q_transposed, value_high}, {k_transposed, value_low}}, w.key_width / 32,
                      w.value_width / 32, c.rows / 32, dstate, w.value_stride, !ended);
  }
};

}  // namespace
}  // namespace monograph
