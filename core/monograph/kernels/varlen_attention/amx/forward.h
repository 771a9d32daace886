// The forward on matrix units, bf16. S = Q K' (Q rows, K columns), softmax on sixteen rows at once,
// O += P V (P rows, V token pairs). Strips of 32 queries against blocks of 256 keys (128 keep
// the scores in L1 but load and store the output twice as often: 12 % slower at 4096 tokens, 512
// are slower too); a block of K and V in L2 serves all strips of the query block and all heads of
// the group. Included by amx.cpp only.
#pragma once

#include "monograph/cpu/bump_allocator.h"
#include "monograph/kernels/varlen_attention/amx/lanes.h"
#include "monograph/kernels/varlen_attention/amx/tiles.h"
#include "monograph/kernels/varlen_attention/unit.h"

namespace monograph {
namespace {

constexpr std::int64_t kStrip = 32;
constexpr std::int64_t kQueryBlock = 128, kKeyBlock = 256;

[[gnu::always_inline]] inline std::int64_t strips(std::int64_t tokens) {
  return (tokens + kStrip - 1) / kStrip;
}

[[gnu::always_inline]] inline Rows rows_of(const HeadsView& view, std::int64_t token,
                                           std::int64_t tokens, std::size_t head,
                                           std::size_t size) {
  const Bf16* const data = static_cast<const Bf16*>(view.data);
  return {data + token * view.token_stride + static_cast<std::ptrdiff_t>(head) * view.head_stride,
          view.token_stride, tokens, static_cast<std::int64_t>(size)};
}

// Strip `s` of the tokens [begin, begin + count).
[[gnu::always_inline]] inline Rows strip_of(const HeadsView& view, std::int64_t begin,
                                            std::int64_t count, std::int64_t s, std::size_t head,
                                            std::size_t size) {
  return rows_of(view, begin + s * kStrip, count - s * kStrip, head, size);
}

struct ForwardPacked {
  Bf16 *k, *v;  // [strip][key_width / 32] columns; [value_width / 32][strip] token pairs
  std::int64_t key_width, value_width;
  bool* nonfinite;  // per strip: v held NaN or an infinity, where its tiles have 0
};

[[gnu::always_inline]] inline ForwardPacked forward_packed(const AttentionProblem& p,
                                                           const Document& d,
                                                           BumpAllocator& allocator) {
  ForwardPacked packed;
  packed.key_width = round_up_32(p.key_size);
  packed.value_width = round_up_32(p.value_size);
  packed.k = allocator.take<Bf16>(strips(d.keys) * kStrip * packed.key_width);
  packed.v = allocator.take<Bf16>(strips(d.keys) * kStrip * packed.value_width);
  packed.nonfinite = allocator.take<bool>(strips(d.keys));
  return packed;
}

std::size_t forward_packed_bytes(const AttentionProblem& p, const Document& d) {
  BumpAllocator allocator{nullptr};
  forward_packed(p, d, allocator);
  return allocator.bytes();
}

void forward_pack(const ForwardUnit& unit, std::int64_t block) {
  const AttentionProblem& p = unit.job.problem;
  const Document& d = unit.document;
  BumpAllocator allocator{unit.packed};
  const ForwardPacked packed = forward_packed(p, d, allocator);
  const std::int64_t first = block * (kKeyBlock / kStrip);
  const std::int64_t last = first + kKeyBlock / kStrip;
  Square square;
  for (std::int64_t s = first; s < last && s < strips(d.keys); ++s) {
    const Rows k = strip_of(unit.job.k, d.key_begin, d.keys, s, unit.kv_head, p.key_size);
    for (std::int64_t c = 0; c < packed.key_width; c += 32) {
      load_square(k, c, square);
      put_columns(square, packed.k + s * packed.key_width * kStrip + c * 32);
    }
    const Rows v = strip_of(unit.job.v, d.key_begin, d.keys, s, unit.kv_head, p.value_size);
    bool nonfinite = false;
    for (std::int64_t c = 0; c < packed.value_width; c += 32) {
      load_square(v, c, square);
      nonfinite |= clear_nonfinite(square);
      put_token_pairs(square, packed.v + (c / 32 * strips(d.keys) + s) * kSquare);
    }
    packed.nonfinite[s] = nonfinite;
  }
}

// One strip of one head.
struct StripState {
  Bf16* q;            // [key_width / 32] rows
  float* out;         // [value_width / 32][2 x 2 tiles]
  float *peak, *sum;  // [32], the reference of the exponent (log2) and the sum of the lanes
};

struct ForwardScratch {
  float* scores;        // [kKeyBlock / 32][2 x 2 tiles]
  Bf16* probabilities;  // [kKeyBlock / 32] rows
  std::byte* states;
  std::int64_t state_bytes;
};

[[gnu::always_inline]] inline StripState strip_state(std::byte* memory, std::int64_t key_width,
                                                     std::int64_t value_width,
                                                     BumpAllocator& allocator) {
  allocator.next = memory;
  StripState state;
  state.q = allocator.take<Bf16>(kStrip * key_width);
  state.out = allocator.take<float>(kStrip * value_width);
  state.peak = allocator.take<float>(kStrip);
  state.sum = allocator.take<float>(kStrip);
  return state;
}

[[gnu::always_inline]] inline ForwardScratch forward_scratch(const AttentionProblem& p,
                                                             BumpAllocator& allocator) {
  ForwardScratch scratch;
  BumpAllocator one{nullptr};
  strip_state(nullptr, round_up_32(p.key_size), round_up_32(p.value_size), one);
  scratch.state_bytes = static_cast<std::int64_t>(one.bytes());
  scratch.scores = allocator.take<float>(kStrip * kKeyBlock);
  scratch.probabilities = allocator.take<Bf16>(kStrip * kKeyBlock);
  const std::int64_t group = static_cast<std::int64_t>(p.heads / p.kv_heads);
  scratch.states = allocator.take<std::byte>(group * (kQueryBlock / kStrip) * scratch.state_bytes);
  return scratch;
}

std::size_t forward_scratch_bytes(const AttentionProblem& p) {
  BumpAllocator allocator{nullptr};
  forward_scratch(p, allocator);
  return allocator.bytes();
}

// Raw products to capped scores in log2; the factor of the exponent is 1 afterwards.
[[gnu::always_inline]] inline void cap_square(float* square, float scale, float softcap) {
  const __m512 inner = _mm512_set1_ps(scale / softcap), outer = _mm512_set1_ps(softcap * kLog2E);
  for (std::int64_t r = 0; r < kSquareF32; r += 16) {
    const __m512 x = _mm512_mul_ps(_mm512_load_ps(square + r), inner);
    _mm512_store_ps(square + r, _mm512_mul_ps(tanh_lanes(x), outer));
  }
}

// Sets to -inf what query i + r may not see of the square's 32 keys from j on.
[[gnu::always_inline]] inline void mask_square(float* square, const Visibility& sees,
                                               std::int64_t i, std::int64_t j) {
  const __m512 minus_inf = _mm512_set1_ps(-__builtin_inff());
  for (std::int64_t r = 0; r < kStrip; ++r) {
    const std::int64_t begin = sees.begin(i + r) - j, end = sees.end(i + r) - j;
    for (std::int64_t tile = 0; tile < 2; ++tile) {
      const __mmask16 seen = lanes_between(begin - tile * 16, end - tile * 16);
      float* const at = square + (r / 16 * 2 + tile) * kTileF32 + r % 16 * 16;
      _mm512_store_ps(at, _mm512_mask_mov_ps(minus_inf, seen, _mm512_load_ps(at)));
    }
  }
}

// Scores of sixteen rows to probabilities against the running reference. Rescales `out` (the rows'
// output so far) when the reference of a row moves, unless there is none yet.
[[gnu::always_inline]] inline void softmax_rows(const float* scores, std::int64_t squares,
                                                float factor, float* peak, float* sum, float* out,
                                                std::int64_t panels, bool first,
                                                Bf16* probabilities) {
  __m512 rows[16];
  for (std::int64_t r = 0; r < 16; ++r) {
    __m512 largest = _mm512_set1_ps(-__builtin_inff());
    for (std::int64_t square = 0; square < squares; ++square) {
      const float* const at = scores + square * kSquareF32 + r * 16;
      largest = _mm512_max_ps(largest, _mm512_load_ps(at));
      largest = _mm512_max_ps(largest, _mm512_load_ps(at + kTileF32));
    }
    rows[r] = largest;
  }
  const __m512 f = _mm512_set1_ps(factor);
  const __m512 top = _mm512_mul_ps(across(rows, Max{}), f);
  const __m512 old = _mm512_load_ps(peak);
  const __mmask16 moved =
      _mm512_cmp_ps_mask(top, _mm512_add_ps(old, _mm512_set1_ps(kSlack)), _CMP_GT_OQ);
  const __m512 reference = _mm512_mask_mov_ps(old, moved, top);
  __m512 total = _mm512_load_ps(sum);
  _mm512_store_ps(peak, reference);
  if (moved != 0 && !first) {
    alignas(64) float shrink[16];
    const __m512 ratio = exp2_lanes(_mm512_sub_ps(old, reference));
    _mm512_store_ps(shrink, ratio);
    total = _mm512_mul_ps(total, ratio);
    for (std::int64_t panel = 0; panel < panels; ++panel)
      for (std::int64_t r = 0; r < 32; ++r) {
        float* const at = out + panel * kSquareF32 + r * 16;
        _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(shrink[r % 16])));
      }
  }
  // Two roundings, not a fused one: the product must meet its own rounded maximum in `base`, or a
  // row of huge scores (1e12) would give 2^100000 or nothing but zeros.
  for (std::int64_t r = 0; r < 16; ++r) {
    const __m512 base = _mm512_set1_ps(peak[r]);
    __m512 lanes = _mm512_setzero_ps();
    for (std::int64_t square = 0; square < squares; ++square) {
      const float* const at = scores + square * kSquareF32 + r * 16;
      const __m512 a = exp2_lanes(_mm512_sub_ps(_mm512_mul_ps(_mm512_load_ps(at), f), base));
      const __m512 b =
          exp2_lanes(_mm512_sub_ps(_mm512_mul_ps(_mm512_load_ps(at + kTileF32), f), base));
      lanes = _mm512_add_ps(lanes, _mm512_add_ps(a, b));
      _mm512_store_si512(probabilities + square * kSquare + r * 32, to_bf16_pair(a, b));
    }
    rows[r] = lanes;
  }
  _mm512_store_ps(sum, _mm512_add_ps(total, across(rows, Add{})));
}

// out += P v over the elements of the 32 values from j on that are NaN or infinite, for the queries
// from i on that see them.
[[gnu::noinline, gnu::cold]] void add_nonfinite_values(const ForwardUnit& unit,
                                                       const Visibility& sees, std::int64_t i,
                                                       std::int64_t j, const Bf16* probabilities,
                                                       float* out) {
  const Document& d = unit.document;
  const Rows v =
      rows_of(unit.job.v, d.key_begin + j, d.keys - j, unit.kv_head, unit.job.problem.value_size);
  for (std::int64_t t = 0; t < kStrip && t < v.tokens; ++t)
    for (std::int64_t c = 0; c < v.size; ++c) {
      const float value = to_float(v.data[t * v.stride + c]);
      if (is_finite(value)) continue;
      for (std::int64_t r = 0; r < kStrip && i + r < d.queries; ++r)
        if (sees.begin(i + r) <= j + t && j + t < sees.end(i + r))
          out[c / 32 * kSquareF32 + (r / 16 * 2 + c % 32 / 16) * kTileF32 + r % 16 * 16 + c % 16] +=
              to_float(probabilities[r * 32 + t]) * value;
    }
}

// Strip of queries from i on against the 32-blocks [first, last) of keys.
void attend_strip(const ForwardUnit& unit, const Visibility& sees, const ForwardPacked& packed,
                  const ForwardScratch& scratch, const StripState& state, std::int64_t i,
                  std::int64_t first, std::int64_t last, bool fresh) {
  const AttentionProblem& p = unit.job.problem;
  const Document& d = unit.document;
  const std::int64_t squares = last - first, panels = packed.value_width / 32;
  // A scale of 0 goes through the cap: it would turn the -inf of a masked score into NaN.
  const float softcap = p.scale == 0 ? 1.f : p.softcap;
  // Queries beyond the last need no mask: their rows are never written.
  const std::int64_t i_end = i + kStrip < d.queries ? i + kStrip : d.queries;
  for (std::int64_t s = 0; s < squares; ++s) {
    float* const square = scratch.scores + s * kSquareF32;
    const std::int64_t j = (first + s) * kStrip;
    multiply<false>(state.q, packed.k + j * packed.key_width, packed.key_width / 32, square);
    if (softcap > 0) cap_square(square, p.scale, softcap);
    if (!sees.covers(i, i_end, j, j + kStrip)) mask_square(square, sees, i, j);
  }
  const float factor = softcap > 0 ? 1.f : p.scale * kLog2E;
  for (std::int64_t half = 0; half < 2; ++half)
    softmax_rows(scratch.scores + half * 2 * kTileF32, squares, factor, state.peak + half * 16,
                 state.sum + half * 16, state.out + half * 2 * kTileF32, panels, fresh,
                 scratch.probabilities + half * kTile);
  for (std::int64_t panel = 0; panel < panels; ++panel) {
    const Bf16* const v = packed.v + (panel * strips(d.keys) + first) * kSquare;
    multiply(scratch.probabilities, v, squares, /*accumulate=*/!fresh,
             state.out + panel * kSquareF32);
  }
  for (std::int64_t s = 0; s < squares; ++s)
    if (packed.nonfinite[first + s])
      add_nonfinite_values(unit, sees, i, (first + s) * kStrip, scratch.probabilities + s * kSquare,
                           state.out);
}

// Divides by the sum, the sink included, and writes the rows and their log-sum-exp.
void finish_strip(const ForwardUnit& unit, const StripState& state, std::size_t head,
                  std::int64_t i) {
  const AttentionProblem& p = unit.job.problem;
  const Document& d = unit.document;
  const std::int64_t width = round_up_32(p.value_size);
  const std::int64_t rows = d.queries - i < kStrip ? d.queries - i : kStrip;
  Bf16* const data = static_cast<Bf16*>(unit.job.out.data) +
                     static_cast<std::ptrdiff_t>(head) * unit.job.out.head_stride;
  float* const lse =
      unit.job.lse + head * p.query_tokens + static_cast<std::size_t>(d.query_begin + i);
  for (std::int64_t r = 0; r < rows; ++r) {
    const float inverse = close_row(state.peak[r], state.sum[r], p.sinks, head, lse + r);
    const __m512 scale = _mm512_set1_ps(inverse);
    const float* const from = state.out + r / 16 * 2 * kTileF32 + r % 16 * 16;
    Bf16* const to = data + (d.query_begin + i + r) * unit.job.out.token_stride;
    for (std::int64_t c = 0; c < width; c += 32) {
      __m512i pair = _mm512_setzero_si512();
      if (inverse != 0)
        pair = to_bf16_pair(
            _mm512_mul_ps(_mm512_load_ps(from + c / 32 * kSquareF32), scale),
            _mm512_mul_ps(_mm512_load_ps(from + c / 32 * kSquareF32 + kTileF32), scale));
      _mm512_mask_storeu_epi16(to + c, first_lanes(static_cast<std::int64_t>(p.value_size) - c),
                               pair);
    }
  }
}

struct KeyRange {
  std::int64_t first, last;  // 32-blocks of keys that a strip of queries may see
};

[[gnu::always_inline]] inline KeyRange keys_of_strip(const Visibility& sees, std::int64_t i,
                                                     std::int64_t queries) {
  const std::int64_t end = i + kStrip < queries ? i + kStrip : queries;
  const std::int64_t last = sees.end(end - 1);
  const std::int64_t first = sees.begin(i);
  if (last <= first) return {0, 0};
  return {first / kStrip, strips(last)};
}

void forward_attend(const ForwardUnit& unit, std::int64_t block, std::byte* memory) {
  const AttentionProblem& p = unit.job.problem;
  const Document& d = unit.document;
  const Visibility sees = visibility(p, d);
  BumpAllocator shared{unit.packed}, own{memory}, inner{nullptr};
  const ForwardPacked packed = forward_packed(p, d, shared);
  const ForwardScratch scratch = forward_scratch(p, own);
  const std::int64_t group = static_cast<std::int64_t>(unit.group());
  const std::int64_t i = block * kQueryBlock;
  const std::int64_t count = strips(d.queries - i < kQueryBlock ? d.queries - i : kQueryBlock);
  const auto state = [&](std::int64_t g, std::int64_t s) __attribute__((always_inline)) {
    return strip_state(scratch.states + (g * count + s) * scratch.state_bytes, packed.key_width,
                       packed.value_width, inner);
  };
  const auto head = [&](std::int64_t g) __attribute__((always_inline)) {
    return unit.kv_head * unit.group() + static_cast<std::size_t>(g);
  };
  Square square;
  for (std::int64_t g = 0; g < group; ++g)
    for (std::int64_t s = 0; s < count; ++s) {
      const StripState strip = state(g, s);
      const Rows q = strip_of(unit.job.q, d.query_begin + i, d.queries - i, s, head(g), p.key_size);
      for (std::int64_t c = 0; c < packed.key_width; c += 32) {
        load_square(q, c, square);
        put_rows(square, strip.q + c * kStrip);
      }
      for (std::int64_t r = 0; r < kStrip; ++r) strip.peak[r] = kNoScore, strip.sum[r] = 0;
    }
  simd::Amx::configure();
  constexpr std::int64_t kStep = kKeyBlock / kStrip;
  const std::int64_t first_block = keys_of_strip(sees, i, d.queries).first / kStep * kStep;
  const std::int64_t end_block = keys_of_strip(sees, i + (count - 1) * kStrip, d.queries).last;
  for (std::int64_t from = first_block; from < end_block; from += kStep)
    for (std::int64_t g = 0; g < group; ++g)
      for (std::int64_t s = 0; s < count; ++s) {
        const KeyRange range = keys_of_strip(sees, i + s * kStrip, d.queries);
        const std::int64_t first = range.first > from ? range.first : from;
        const std::int64_t last = range.last < from + kStep ? range.last : from + kStep;
        if (first >= last) continue;
        attend_strip(unit, sees, packed, scratch, state(g, s), i + s * kStrip, first, last,
                     first == range.first);
      }
  simd::Amx::release();
  for (std::int64_t g = 0; g < group; ++g)
    for (std::int64_t s = 0; s < count; ++s)
      finish_strip(unit, state(g, s), head(g), i + s * kStrip);
}

}  // namespace
}  // namespace monograph
