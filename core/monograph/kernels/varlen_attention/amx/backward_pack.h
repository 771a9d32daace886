// What the backward on matrix units prepares: K, V, Q and dO in the layouts of its products, and of
// each query its log-sum-exp and delta = dO . out. Included by amx.cpp only.
#pragma once

#include "monograph/kernels/varlen_attention/amx/forward.h"

namespace monograph {
namespace {

constexpr std::int64_t kBackwardBlock = 256;  // keys and queries alike
constexpr std::int64_t kPieces = kBackwardBlock / kStrip;

struct QueryPacked {
  Bf16 *q_columns, *dout_columns;  // [strip][width / 32] columns
  Bf16 *q_pairs, *dout_pairs;      // [width / 32][strip] token pairs
  float *lse, *delta;              // per query, padded to whole strips; lse in log2
  bool* nonfinite;  // per strip: q or dO holds NaN or an infinity, where the pairs have 0
};

struct BackwardPacked {
  Bf16 *k_rows, *v_rows;  // [strip][width / 32] rows
  Bf16* k_transposed;     // [width / 32][strip] transposed
  bool* nonfinite;        // per strip: K holds NaN or an infinity, where k_transposed has 0
  std::int64_t key_width, value_width;
  std::byte* queries;
  std::int64_t query_bytes;
};

[[gnu::always_inline]] inline QueryPacked query_packed(const BackwardPacked& packed,
                                                       std::int64_t queries, std::byte* memory,
                                                       BumpAllocator& allocator) {
  const std::int64_t tokens = strips(queries) * kStrip;
  allocator.next = memory;
  QueryPacked q;
  q.q_columns = allocator.take<Bf16>(tokens * packed.key_width);
  q.q_pairs = allocator.take<Bf16>(tokens * packed.key_width);
  q.dout_columns = allocator.take<Bf16>(tokens * packed.value_width);
  q.dout_pairs = allocator.take<Bf16>(tokens * packed.value_width);
  q.lse = allocator.take<float>(tokens);
  q.delta = allocator.take<float>(tokens);
  q.nonfinite = allocator.take<bool>(strips(queries));
  return q;
}

[[gnu::always_inline]] inline BackwardPacked backward_packed(const AttentionProblem& p,
                                                             const Document& d,
                                                             BumpAllocator& allocator) {
  BackwardPacked packed;
  packed.key_width = round_up_32(p.key_size);
  packed.value_width = round_up_32(p.value_size);
  const std::int64_t tokens = strips(d.keys) * kStrip;
  packed.k_rows = allocator.take<Bf16>(tokens * packed.key_width);
  packed.k_transposed = allocator.take<Bf16>(tokens * packed.key_width);
  packed.v_rows = allocator.take<Bf16>(tokens * packed.value_width);
  packed.nonfinite = allocator.take<bool>(strips(d.keys));
  packed.queries = allocator.next;
  BumpAllocator one{nullptr};
  query_packed(packed, d.queries, nullptr, one);
  packed.query_bytes = static_cast<std::int64_t>(one.bytes());
  return packed;
}

[[gnu::always_inline]] inline QueryPacked slot_of(const BackwardPacked& packed, const Document& d,
                                                  std::size_t slot) {
  BumpAllocator allocator{nullptr};
  std::byte* const memory = packed.queries + static_cast<std::int64_t>(slot) * packed.query_bytes;
  return query_packed(packed, d.queries, memory, allocator);
}

std::size_t backward_packed_bytes(const AttentionProblem& p, const Document& d, std::size_t slots) {
  BumpAllocator allocator{nullptr};
  const BackwardPacked packed = backward_packed(p, d, allocator);
  return allocator.bytes() + slots * static_cast<std::size_t>(packed.query_bytes);
}

void backward_pack_keys(const BackwardUnit& unit, std::int64_t block) {
  const AttentionProblem& p = unit.job.problem;
  const Document& d = unit.document;
  BumpAllocator allocator{unit.packed};
  const BackwardPacked packed = backward_packed(p, d, allocator);
  Square square;
  const std::int64_t first = block * kPieces;
  for (std::int64_t s = first; s < first + kPieces && s < strips(d.keys); ++s) {
    const Rows k = strip_of(unit.job.k, d.key_begin, d.keys, s, unit.kv_head, p.key_size);
    bool nonfinite = false;
    for (std::int64_t c = 0; c < packed.key_width; c += 32) {
      load_square(k, c, square);
      put_rows(square, packed.k_rows + (s * packed.key_width + c) * kStrip);
      nonfinite |= clear_nonfinite(square);
      put_transposed(square, packed.k_transposed + (c / 32 * strips(d.keys) + s) * kSquare);
    }
    packed.nonfinite[s] = nonfinite;
    const Rows v = strip_of(unit.job.v, d.key_begin, d.keys, s, unit.kv_head, p.value_size);
    for (std::int64_t c = 0; c < packed.value_width; c += 32) {
      load_square(v, c, square);
      put_rows(square, packed.v_rows + (s * packed.value_width + c) * kStrip);
    }
  }
}

// lse and delta of a strip. A missing query has both 0: its products are masked.
void row_sums(const BackwardUnit& unit, std::size_t head, std::int64_t s, const QueryPacked& q) {
  const AttentionProblem& p = unit.job.problem;
  const Document& d = unit.document;
  const Rows out = strip_of(unit.job.out, d.query_begin, d.queries, s, head, p.value_size);
  const Rows dout = strip_of(unit.job.dout, d.query_begin, d.queries, s, head, p.value_size);
  const float* const lse =
      unit.job.lse + head * p.query_tokens + static_cast<std::size_t>(d.query_begin + s * kStrip);
  for (std::int64_t r = 0; r < kStrip; ++r) {
    __m512 sum = _mm512_setzero_ps();
    const bool exists = r < out.tokens;
    for (std::int64_t c = 0; exists && c < out.size; c += 32) {
      const __mmask32 mask = first_lanes(out.size - c);
      const __m512i a = _mm512_maskz_loadu_epi16(mask, out.data + r * out.stride + c);
      const __m512i b = _mm512_maskz_loadu_epi16(mask, dout.data + r * dout.stride + c);
      sum = _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    }
    q.delta[s * kStrip + r] = _mm512_reduce_add_ps(sum);
    q.lse[s * kStrip + r] = exists ? lse[r] * kLog2E : 0;
  }
}

void backward_pack_queries(const BackwardUnit& unit, std::size_t head, std::size_t slot,
                           std::int64_t block) {
  const AttentionProblem& p = unit.job.problem;
  const Document& d = unit.document;
  BumpAllocator allocator{unit.packed};
  const BackwardPacked packed = backward_packed(p, d, allocator);
  const QueryPacked to = slot_of(packed, d, slot);
  Square square;
  const std::int64_t first = block * kPieces;
  for (std::int64_t s = first; s < first + kPieces && s < strips(d.queries); ++s) {
    const Rows q = strip_of(unit.job.q, d.query_begin, d.queries, s, head, p.key_size);
    bool nonfinite = false;
    for (std::int64_t c = 0; c < packed.key_width; c += 32) {
      load_square(q, c, square);
      put_columns(square, to.q_columns + (s * packed.key_width + c) * kStrip);
      nonfinite |= clear_nonfinite(square);
      put_token_pairs(square, to.q_pairs + (c / 32 * strips(d.queries) + s) * kSquare);
    }
    const Rows dout = strip_of(unit.job.dout, d.query_begin, d.queries, s, head, p.value_size);
    for (std::int64_t c = 0; c < packed.value_width; c += 32) {
      load_square(dout, c, square);
      put_columns(square, to.dout_columns + (s * packed.value_width + c) * kStrip);
      nonfinite |= clear_nonfinite(square);
      put_token_pairs(square, to.dout_pairs + (c / 32 * strips(d.queries) + s) * kSquare);
    }
    to.nonfinite[s] = nonfinite;
    row_sums(unit, head, s, to);
  }
}

// d loss / d sink = -sum over queries of p(sink) * delta, which is 0 for a query without keys,
// whatever its dout.
float backward_sink_gradient(const BackwardUnit& unit, std::size_t head, std::size_t slot) {
  const Document& d = unit.document;
  BumpAllocator allocator{unit.packed};
  const BackwardPacked packed = backward_packed(unit.job.problem, d, allocator);
  const QueryPacked q = slot_of(packed, d, slot);
  const __m512 sink = _mm512_set1_ps(unit.job.problem.sinks[head] * kLog2E);
  if (d.keys == 0) return 0;
  const std::int64_t first = visibility(unit.job.problem, d).first_with_keys();
  __m512 sum = _mm512_setzero_ps();
  for (std::int64_t i = 0; i < d.queries; i += 16) {
    const __mmask16 counts = lanes_between(first - i, d.queries - i);
    const __m512 p = exp2_lanes(_mm512_sub_ps(sink, _mm512_load_ps(q.lse + i)));
    sum = _mm512_fnmadd_ps(_mm512_maskz_mov_ps(counts, p),
                           _mm512_maskz_load_ps(counts, q.delta + i), sum);
  }
  return _mm512_reduce_add_ps(sum);
}

}  // namespace
}  // namespace monograph
