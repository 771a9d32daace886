// One pass of the backward over a block of keys and a block of queries. With keys as rows: S' = K
// Q', dP' = V dO', P' and dS' = P' (dP' - delta) by lanes of queries, then dV += P' dO, dK += dS' Q
// and dQ' += K' dS'. Blocks of 256 keys by 256 queries in 32 x 32 pieces; a piece beyond the
// diagonal or the window is skipped in all five products. Included by amx.cpp only.
#pragma once

#include "monograph/kernels/varlen_attention/amx/backward_pack.h"

namespace monograph {
namespace {

struct BackwardScratch {
  float *scores, *dscores;  // one 32 x 32 piece, [2 key tiles][2 query tiles]
  // P' and dS' of a strip of keys: [pieces of queries][2 key tiles][16 keys][32 queries]
  Bf16 *probabilities, *ds;
  Bf16* ds_pairs;       // [pieces of queries][pieces of keys][2][16 key pairs][16 queries][2]
  float *dk, *dv, *dq;  // sums of one block, when a phase keeps only one
};

[[gnu::always_inline]] inline BackwardScratch backward_scratch(const AttentionProblem& p,
                                                               BumpAllocator& allocator) {
  BackwardScratch scratch;
  scratch.scores = allocator.take<float>(kStrip * kStrip);
  scratch.dscores = allocator.take<float>(kStrip * kStrip);
  scratch.probabilities = allocator.take<Bf16>(kStrip * kBackwardBlock);
  scratch.ds = allocator.take<Bf16>(kStrip * kBackwardBlock);
  scratch.ds_pairs = allocator.take<Bf16>(kBackwardBlock * kBackwardBlock);
  const std::int64_t key_width = round_up_32(p.key_size), value_width = round_up_32(p.value_size);
  scratch.dk = allocator.take<float>(kBackwardBlock * key_width);
  scratch.dv = allocator.take<float>(kBackwardBlock * value_width);
  scratch.dq = scratch.dk;  // no phase that takes a block of each
  return scratch;
}

std::size_t backward_scratch_bytes(const AttentionProblem& p) {
  BumpAllocator allocator{nullptr};
  backward_scratch(p, allocator);
  return allocator.bytes();
}

struct Piece {
  std::int64_t i, j;  // first query, first key
};

// Sixteen queries of one key: the probability and, from dP, the gradient of the raw product divided
// by `scale`.
template <bool kCap>
[[gnu::always_inline]] inline void gradient_lanes(const AttentionProblem& p, __m512 score,
                                                  __m512 dscore, __m512 lse, __m512 delta,
                                                  __mmask16 seen, __m512& probability,
                                                  __m512& gradient) {
  if constexpr (kCap) {
    const __m512 t = tanh_lanes(_mm512_mul_ps(score, _mm512_set1_ps(p.scale / p.softcap)));
    const __m512 x = _mm512_fmsub_ps(t, _mm512_set1_ps(p.softcap * kLog2E), lse);
    probability = _mm512_maskz_mov_ps(seen, exp2_lanes(_mm512_min_ps(_mm512_setzero_ps(), x)));
    const __m512 slope = _mm512_fnmadd_ps(t, t, _mm512_set1_ps(1.f));
    gradient = _mm512_mul_ps(probability, _mm512_mul_ps(slope, _mm512_sub_ps(dscore, delta)));
  } else {
    const __m512 x = _mm512_fmsub_ps(score, _mm512_set1_ps(p.scale * kLog2E), lse);
    // A probability is at most 1, whatever rounding does to huge scores.
    probability = _mm512_maskz_mov_ps(seen, exp2_lanes(_mm512_min_ps(_mm512_setzero_ps(), x)));
    gradient = _mm512_mul_ps(probability, _mm512_sub_ps(dscore, delta));
  }
  gradient = _mm512_maskz_mov_ps(seen, gradient);
}

// Scores and dP of a piece to P' and dS' rows and dS' key pairs. The pairs' queries are in the
// order of the in-lane unpack: column c of half h is query c / 4 * 8 + h * 4 + c % 4.
template <bool kCap, bool kPlain>
void differentiate_piece(const AttentionProblem& p, const Visibility& sees, const Piece& piece,
                         std::int64_t queries, const QueryPacked& q, const BackwardScratch& scratch,
                         Bf16* probabilities, Bf16* ds, Bf16* ds_pairs) {
  __m512 lse[2], delta[2];
  __m512i begin[2], end[2];
  for (int h = 0; h < 2; ++h) {
    lse[h] = _mm512_load_ps(q.lse + piece.i + 16 * h);
    delta[h] = _mm512_load_ps(q.delta + piece.i + 16 * h);
    if constexpr (!kPlain) {
      alignas(64) std::int32_t b[16], e[16];
      for (std::int64_t c = 0; c < 16; ++c) {
        const std::int64_t i = piece.i + 16 * h + c;
        b[c] = i < queries ? static_cast<std::int32_t>(sees.begin(i)) : 0;
        e[c] = i < queries ? static_cast<std::int32_t>(sees.end(i)) : 0;
      }
      begin[h] = _mm512_load_si512(b);
      end[h] = _mm512_load_si512(e);
    }
  }
  for (std::int64_t r = 0; r < kStrip; r += 2) {
    __m512i rows[2];
    for (std::int64_t k = 0; k < 2; ++k) {
      const std::int64_t at = (r + k) / 16 * 2 * kTileF32 + (r + k) % 16 * 16;
      __m512 probability[2], gradient[2];
      for (int h = 0; h < 2; ++h) {
        __mmask16 seen = 0xffff;
        if constexpr (!kPlain) {
          const __m512i j = _mm512_set1_epi32(static_cast<std::int32_t>(piece.j + r + k));
          seen = _mm512_mask_cmplt_epi32_mask(_mm512_cmpge_epi32_mask(j, begin[h]), j, end[h]);
        }
        gradient_lanes<kCap>(p, _mm512_load_ps(scratch.scores + at + h * kTileF32),
                             _mm512_load_ps(scratch.dscores + at + h * kTileF32), lse[h], delta[h],
                             seen, probability[h], gradient[h]);
      }
      rows[k] = to_bf16_pair(gradient[0], gradient[1]);
      _mm512_store_si512(probabilities + (r + k) * 32,
                         to_bf16_pair(probability[0], probability[1]));
      _mm512_store_si512(ds + (r + k) * 32, rows[k]);
    }
    _mm512_store_si512(ds_pairs + r * 16, _mm512_unpacklo_epi16(rows[0], rows[1]));
    _mm512_store_si512(ds_pairs + kTile + r * 16, _mm512_unpackhi_epi16(rows[0], rows[1]));
  }
}

// What a pass over a block of keys and a block of queries adds to; null: not wanted. A strip is
// written, not added to, when it is met first: no clearing, no load (5 % of a document of 512).
struct Sums {
  float *dk, *dv;                // of the key block: [strip][width / 32][2 key tiles x 2]
  float* dq;                     // of the query block: [strip][key_width / 32][2 element tiles x 2]
  bool *keys_met, *queries_met;  // a flag per strip
};

struct BlockPass {
  const AttentionProblem& p;
  const Document& d;
  Visibility sees;
  BackwardPacked packed;
  BackwardScratch scratch;

  [[gnu::always_inline]] bool touches(std::int64_t key_strip, std::int64_t query_strip) const {
    const std::int64_t i = query_strip * kStrip, j = key_strip * kStrip;
    const std::int64_t i_end = i + kStrip < d.queries ? i + kStrip : d.queries;
    const std::int64_t j_end = j + kStrip < d.keys ? j + kStrip : d.keys;
    return i < d.queries && j < d.keys && sees.touches(i, i_end, j, j_end);
  }

  // S' and dP' of one piece, then P' and dS'.
  void scores(const QueryPacked& q, std::int64_t key_strip, std::int64_t query_strip,
              Bf16* probabilities, Bf16* ds, Bf16* ds_pairs) const {
    const std::int64_t kw = packed.key_width, vw = packed.value_width;
    multiply<false>(packed.k_rows + key_strip * kw * kStrip,
                    q.q_columns + query_strip * kw * kStrip, kw / 32, scratch.scores);
    multiply<false>(packed.v_rows + key_strip * vw * kStrip,
                    q.dout_columns + query_strip * vw * kStrip, vw / 32, scratch.dscores);
    const std::int64_t i = query_strip * kStrip, j = key_strip * kStrip;
    const bool plain = i + kStrip <= d.queries && sees.covers(i, i + kStrip, j, j + kStrip);
    const auto run = [&]<bool kCap, bool kPlain>() __attribute__((always_inline)) {
      differentiate_piece<kCap, kPlain>(p, sees, {i, j}, d.queries, q, scratch, probabilities, ds,
                                        ds_pairs);
    };
    if (p.softcap > 0)
      plain ? run.template operator()<true, true>() : run.template operator()<true, false>();
    else
      plain ? run.template operator()<false, true>() : run.template operator()<false, false>();
  }

  // sum[key strip] += left (P' or dS' of the strip) * right (token pairs of dO or Q).
  [[gnu::always_inline]] void add_keys(const Bf16* left, const Bf16* right, std::int64_t first,
                                       std::int64_t count, std::int64_t width, bool met,
                                       float* sum) const {
    for (std::int64_t panel = 0; panel < width / 32; ++panel)
      multiply(left, right + (panel * strips(d.queries) + first) * kSquare, count, met,
               sum + panel * kSquareF32);
  }

  void run(const QueryPacked& q, std::int64_t key_block, std::int64_t query_block,
           const Sums& sums) const {
    const std::int64_t j0 = key_block * kPieces, i0 = query_block * kPieces;
    const std::int64_t kw = packed.key_width, vw = packed.value_width;
    std::int64_t first_key[kPieces], last_key[kPieces];
    for (std::int64_t s = 0; s < kPieces; ++s) first_key[s] = kPieces, last_key[s] = 0;
    for (std::int64_t t = 0; t < kPieces; ++t) {
      std::int64_t first = kPieces, last = 0;
      for (std::int64_t s = 0; s < kPieces; ++s) {
        if (!touches(j0 + t, i0 + s)) continue;
        first = first < s ? first : s;
        last = s + 1;
        first_key[s] = first_key[s] < t ? first_key[s] : t;
        last_key[s] = t + 1;
        scores(q, j0 + t, i0 + s, scratch.probabilities + s * kSquare, scratch.ds + s * kSquare,
               scratch.ds_pairs + (s * kPieces + t) * kSquare);
      }
      if (first >= last || sums.dk == nullptr) continue;
      add_keys(scratch.probabilities + first * kSquare, q.dout_pairs, i0 + first, last - first, vw,
               sums.keys_met[t], sums.dv + t * kStrip * vw);
      add_keys(scratch.ds + first * kSquare, q.q_pairs, i0 + first, last - first, kw,
               sums.keys_met[t], sums.dk + t * kStrip * kw);
      sums.keys_met[t] = true;
      for (std::int64_t s = first; s < last; ++s)
        if (q.nonfinite[i0 + s]) {
          add_nonfinite_queries(scratch.probabilities + s * kSquare, q.dout_columns, j0 + t, i0 + s,
                                vw, sums.dv + t * kStrip * vw);
          add_nonfinite_queries(scratch.ds + s * kSquare, q.q_columns, j0 + t, i0 + s, kw,
                                sums.dk + t * kStrip * kw);
        }
    }
    for (std::int64_t s = 0; s < kPieces && sums.dq != nullptr; ++s)
      if (first_key[s] < last_key[s]) {
        add_queries(j0, s, first_key[s], last_key[s], sums.queries_met[s], sums.dq);
        for (std::int64_t t = first_key[s]; t < last_key[s]; ++t)
          if (packed.nonfinite[j0 + t])
            add_nonfinite_keys(scratch.ds_pairs + (s * kPieces + t) * kSquare, j0 + t, i0 + s,
                               sums.dq + s * kStrip * kw);
        sums.queries_met[s] = true;
      }
  }

  [[gnu::always_inline]] bool sees_key(std::int64_t i, std::int64_t j) const {
    return i < d.queries && sees.begin(i) <= j && j < sees.end(i);
  }

  // A strip of dK or dV += left (dS' or P') times the elements of its queries (from `columns`) that
  // are NaN or infinite, for the keys that the query sees.
  [[gnu::noinline, gnu::cold]] void add_nonfinite_queries(const Bf16* left, const Bf16* columns,
                                                          std::int64_t key_strip,
                                                          std::int64_t query_strip,
                                                          std::int64_t width, float* sum) const {
    const std::int64_t i = query_strip * kStrip, j = key_strip * kStrip;
    for (std::int64_t c = 0; c < width; ++c)
      for (std::int64_t t = 0; t < kStrip; ++t) {
        const float x = to_float(columns[i * width + c / 32 * kSquare + t / 16 * kTile +
                                         c % 32 / 2 * 32 + t % 16 * 2 + c % 2]);
        if (is_finite(x)) continue;
        for (std::int64_t r = 0; r < kStrip; ++r)
          if (sees_key(i + t, j + r))
            sum[c / 32 * kSquareF32 + (r / 16 * 2 + c % 32 / 16) * kTileF32 + r % 16 * 16 +
                c % 16] += to_float(left[r * 32 + t]) * x;
      }
  }

  // A strip of dQ' += dS' (as key pairs) times the elements of K that are NaN or infinite, for the
  // queries that see the key; queries in the order of the unpack.
  [[gnu::noinline, gnu::cold]] void add_nonfinite_keys(const Bf16* pairs, std::int64_t key_strip,
                                                       std::int64_t query_strip, float* sum) const {
    const std::int64_t kw = packed.key_width, i = query_strip * kStrip, j = key_strip * kStrip;
    for (std::int64_t c = 0; c < kw; ++c)
      for (std::int64_t r = 0; r < kStrip; ++r) {
        const float x = to_float(packed.k_rows[j * kw + c / 32 * kSquare + r * 32 + c % 32]);
        if (is_finite(x)) continue;
        for (std::int64_t t = 0; t < kStrip; ++t) {
          const std::int64_t half = t / 4 % 2, column = t / 8 * 4 + t % 4;
          if (sees_key(i + t, j + r))
            sum[c / 32 * kSquareF32 + (c % 32 / 16 * 2 + half) * kTileF32 + c % 16 * 16 + column] +=
                to_float(pairs[half * kTile + r / 2 * 32 + column * 2 + r % 2]) * x;
        }
      }
  }

  // dQ' of strip s += transposed K * dS' over the strips [first, last) of the key block.
  [[gnu::always_inline]] void add_queries(std::int64_t j0, std::int64_t s, std::int64_t first,
                                          std::int64_t last, bool met, float* dq) const {
    const std::int64_t kw = packed.key_width;
    for (std::int64_t panel = 0; panel < kw / 32; ++panel)
      multiply(packed.k_transposed + (panel * strips(d.keys) + j0 + first) * kSquare,
               scratch.ds_pairs + (s * kPieces + first) * kSquare, last - first, met,
               dq + s * kStrip * kw + panel * kSquareF32);
  }
};

}  // namespace
}  // namespace monograph
