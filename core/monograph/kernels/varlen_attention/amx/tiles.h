// Tiles of 16 rows by 64 bytes: the 2 x 2 product, and the packers that bring bf16 rows into the
// layouts the products read. Included by amx.cpp only.
//
// A square is 32 tokens by 32 elements in two tiles of 1 KiB, zero where there is no data. Named
// after what a tile row holds:
//   rows         [2 halves of the tokens][16 tokens][32 elements]             left operand
//   columns      [2 halves of the tokens][16 element pairs][16 tokens][2]     right operand
//   token pairs  [2 halves of the elements][16 token pairs][16 elements][2]   right operand
//   transposed   [2 halves of the elements][16 elements][32 tokens]           left operand
// Squares that one product sums over are neighbours: those of a token strip in rows and columns,
// those of 32 elements (a panel) in the other two. A result is 2 x 2 tiles of fp32, contiguous.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "monograph/base/float_types.h"
#include "monograph/simd/amx.h"

namespace monograph {
namespace {

constexpr std::int64_t kTile = kTileBytes / 2;  // bf16 elements
constexpr std::int64_t kTileF32 = kTileFloats;
constexpr std::int64_t kSquare = 2 * kTile;        // bf16 elements of an operand
constexpr std::int64_t kSquareF32 = 4 * kTileF32;  // fp32 elements of a result

[[gnu::always_inline]] inline std::int64_t round_up_32(std::size_t n) {
  return static_cast<std::int64_t>((n + 31) / 32 * 32);
}

// c (2 x 2 tiles) {=, +=} sum over `steps` of a (2 tiles per step) * b (2 tiles per step), all
// contiguous: rows of 8 KiB would put every step of an operand into the same half of the L1 sets.
// One chain per result tile, in ascending order.
template <bool kAccumulate>
[[gnu::always_inline]] inline void multiply(const Bf16* a, const Bf16* b, std::int64_t steps,
                                            float* c) {
  // GCC's tile loads do not say that they read memory.
  asm volatile("" ::: "memory");
  if constexpr (kAccumulate) {
    _tile_loadd(0, c, 64);
    _tile_loadd(1, c + kTileF32, 64);
    _tile_loadd(2, c + 2 * kTileF32, 64);
    _tile_loadd(3, c + 3 * kTileF32, 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (std::int64_t k = 0; k < steps; ++k, a += 2 * kTile, b += 2 * kTile) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + kTile, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + kTile, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, 64);
  _tile_stored(1, c + kTileF32, 64);
  _tile_stored(2, c + 2 * kTileF32, 64);
  _tile_stored(3, c + 3 * kTileF32, 64);
}

[[gnu::always_inline]] inline void multiply(const Bf16* a, const Bf16* b, std::int64_t steps,
                                            bool accumulate, float* c) {
  if (accumulate)
    multiply<true>(a, b, steps, c);
  else
    multiply<false>(a, b, steps, c);
}

// Rows of a strided bf16 tensor: `tokens` of them exist, `size` elements each.
struct Rows {
  const Bf16* data;
  std::ptrdiff_t stride;
  std::int64_t tokens, size;
};

// 32 tokens by 32 elements from `column` on, zero where there is no data.
struct Square {
  alignas(64) Bf16 at[32][32];
};

// Prefetches the same columns of the next 32 tokens: a token's heads fill a page or more, so the
// hardware sees no pattern in one head (waiting here was 92 % of the time of packing).
[[gnu::always_inline]] inline void load_square(const Rows& rows, std::int64_t column, Square& out) {
  const __mmask32 mask = first_lanes(rows.size - column);
  for (std::int64_t t = 0; t < 32; ++t) {
    if (t + 32 < rows.tokens) __builtin_prefetch(rows.data + (t + 32) * rows.stride + column);
    const __m512i row = t < rows.tokens
                            ? _mm512_maskz_loadu_epi16(mask, rows.data + t * rows.stride + column)
                            : _mm512_setzero_si512();
    _mm512_store_si512(out.at[t], row);
  }
}

// Puts 0 where an element is NaN or infinite, and says whether one was: a zero probability times it
// would be NaN. Tile products take the zeros; add_*() in forward.h and backward.h bring the terms
// of those who see such an element.
[[gnu::always_inline]] inline bool clear_nonfinite(Square& square) {
  const __m512i magnitude = _mm512_set1_epi16(0x7fff), infinity = _mm512_set1_epi16(0x7f80);
  __m512i largest = _mm512_setzero_si512();
  for (std::int64_t t = 0; t < 32; ++t)
    largest =
        _mm512_max_epu16(largest, _mm512_and_si512(_mm512_load_si512(square.at[t]), magnitude));
  if (_mm512_cmpge_epu16_mask(largest, infinity) == 0) return false;
  for (std::int64_t t = 0; t < 32; ++t) {
    const __m512i row = _mm512_load_si512(square.at[t]);
    const __mmask32 finite = _mm512_cmplt_epu16_mask(_mm512_and_si512(row, magnitude), infinity);
    _mm512_store_si512(square.at[t], _mm512_maskz_mov_epi16(finite, row));
  }
  return true;
}

[[gnu::always_inline]] inline bool is_finite(float x) { return x - x == 0; }

[[gnu::always_inline]] inline void put_rows(const Square& in, Bf16* out) {
  for (std::int64_t t = 0; t < 32; ++t)
    _mm512_store_si512(out + t * 32, _mm512_load_si512(in.at[t]));
}

[[gnu::always_inline]] inline void put_columns(const Square& in, Bf16* out) {
  for (std::int64_t half = 0; half < 2; ++half) {
    __m512i t[16];
    transpose_16x16(reinterpret_cast<const std::uint32_t*>(in.at[16 * half]), 16, t);
    for (std::int64_t i = 0; i < 16; ++i) _mm512_store_si512(out + half * kTile + i * 32, t[i]);
  }
}

[[gnu::always_inline]] inline void put_token_pairs(const Square& in, Bf16* out) {
  // Quadwords so placed that the in-lane unpacks give elements 0-15 and 16-31 in order.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  for (std::int64_t t = 0; t < 16; ++t) {
    const __m512i a = _mm512_permutexvar_epi64(order, _mm512_load_si512(in.at[2 * t]));
    const __m512i b = _mm512_permutexvar_epi64(order, _mm512_load_si512(in.at[2 * t + 1]));
    _mm512_store_si512(out + t * 32, _mm512_unpacklo_epi16(a, b));
    _mm512_store_si512(out + kTile + t * 32, _mm512_unpackhi_epi16(a, b));
  }
}

// The token pairs, transposed.
[[gnu::always_inline]] inline void put_transposed(const Square& in, Bf16* out) {
  alignas(64) Bf16 pairs[2 * kTile];
  put_token_pairs(in, pairs);
  for (std::int64_t half = 0; half < 2; ++half) {
    __m512i t[16];
    transpose_16x16(reinterpret_cast<const std::uint32_t*>(pairs + half * kTile), 16, t);
    for (std::int64_t i = 0; i < 16; ++i) _mm512_store_si512(out + half * kTile + i * 32, t[i]);
  }
}

}  // namespace
}  // namespace monograph
