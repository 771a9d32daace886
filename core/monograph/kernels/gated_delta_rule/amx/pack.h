// fp32 and bf16 rows to the operands of tile products, in the layouts of varlen_attention's tiles,
// and the product. Included by amx.cpp only.
#pragma once

#include "monograph/kernels/gated_delta_rule/vector/product.h"
#include "monograph/kernels/varlen_attention/amx/tiles.h"

namespace monograph {
namespace {

enum class Layout : std::uint8_t { kRows, kColumns, kPairs, kTransposed };

constexpr bool is_left(Layout layout) {
  return layout == Layout::kRows || layout == Layout::kTransposed;
}
constexpr bool sums_over_rows(Layout layout) {
  return layout == Layout::kPairs || layout == Layout::kTransposed;
}

[[gnu::always_inline]] inline __m512 widened(__m256i half) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// 32 x 32 numbers, load(row, half) sixteen of them, as bf16; with kSplit also what the rounding
// left, in `low`.
template <Layout kLayout, bool kSplit, class Load>
[[gnu::always_inline]] inline void pack_square(const Load& load, Bf16* high, Bf16* low) {
  constexpr bool kTranspose = kLayout == Layout::kColumns || kLayout == Layout::kTransposed;
  alignas(64) Bf16 transposed[2][kSquare];
  Bf16* const to[2] = {kTranspose ? transposed[0] : high, kTranspose ? transposed[1] : low};
  // Words of the first vector to the even places, of the second to the odd ones.
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (std::int64_t t = 0; t < 32; ++t) {
    // Two vectors that make one row of a tile: both halves of a row, or one half of two rows.
    const bool pairs = sums_over_rows(kLayout);
    const std::int64_t row = pairs ? t % 16 * 2 : t, half = pairs ? t / 16 : 0;
    const __m512 a = load(row, half), b = pairs ? load(row + 1, half) : load(row, 1);
    const __m512i bits = to_bf16_pair(a, b);
    _mm512_store_si512(to[0] + t * 32, pairs ? _mm512_permutexvar_epi16(order, bits) : bits);
    if constexpr (kSplit) {
      const __m512 c = _mm512_sub_ps(a, widened(_mm512_castsi512_si256(bits)));
      const __m512 d = _mm512_sub_ps(b, widened(_mm512_extracti64x4_epi64(bits, 1)));
      const __m512i rest = to_bf16_pair(c, d);
      _mm512_store_si512(to[1] + t * 32, pairs ? _mm512_permutexvar_epi16(order, rest) : rest);
    }
  }
  if constexpr (kTranspose)
    for (std::int64_t part = 0; part < (kSplit ? 4 : 2); ++part) {
      __m512i words[16];
      transpose_16x16(reinterpret_cast<const std::uint32_t*>(transposed[0] + part * kTile), 16,
                      words);
      Bf16* const out = (part < 2 ? high : low) + part % 2 * kTile;
      for (std::int64_t i = 0; i < 16; ++i) _mm512_store_si512(out + i * 32, words[i]);
    }
}

// A matrix of `rows` by `columns`, multiples of 32: load(row, column) gives sixteen numbers.
// Squares that one product sums over are neighbours.
template <Layout kLayout, bool kSplit, class Load>
[[gnu::always_inline]] inline void pack(std::int64_t rows, std::int64_t columns, const Load& load,
                                        Bf16* high, Bf16* low = nullptr) {
  for (std::int64_t r = 0; r < rows; r += 32)
    for (std::int64_t c = 0; c < columns; c += 32) {
      const std::int64_t square = sums_over_rows(kLayout) ? c / 32 * (rows / 32) + r / 32
                                                          : r / 32 * (columns / 32) + c / 32;
      const auto part = [&](std::int64_t row, std::int64_t half) __attribute__((always_inline)) {
        return load(r + row, c + 16 * half);
      };
      pack_square<kLayout, kSplit>(part, high + square * kSquare,
                                   kSplit ? low + square * kSquare : nullptr);
    }
}

// A product's left operand [m][depth] and right operand [n][depth], in squares.
struct Term {
  const Bf16 *left, *right;
};

// c[32 m, 32 n] = (keep ? c : 0) + the sum of the terms, over `depth` squares each. One chain per
// element.
template <std::size_t kTerms>
[[gnu::noinline]] void multiply_terms(const Term (&terms)[kTerms], std::int64_t m_count,
                                      std::int64_t n_count, std::int64_t depth, float* c,
                                      std::int64_t ldc, bool keep,
                                      DeltaShape shape = DeltaShape::kFull) {
  const std::size_t row = static_cast<std::size_t>(ldc) * sizeof(float);
  for (std::int64_t m = 0; m < m_count; ++m)
    for (std::int64_t n = 0; n < n_count; ++n) {
      if (shape == DeltaShape::kResults && n > m) continue;
      const std::int64_t begin = shape == DeltaShape::kUpper ? m : 0;
      const std::int64_t end = shape == DeltaShape::kLower ? m + 1 : depth;
      float* const at = c + m * 32 * ldc + n * 32;
      asm volatile("" ::: "memory");  // GCC's tile loads do not say that they read memory
      if (keep) {
        _tile_loadd(0, at, row);
        _tile_loadd(1, at + 16, row);
        _tile_loadd(2, at + 16 * ldc, row);
        _tile_loadd(3, at + 16 * ldc + 16, row);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (const Term& term : terms) {
        const Bf16* a = term.left + (m * depth + begin) * kSquare;
        const Bf16* b = term.right + (n * depth + begin) * kSquare;
        for (std::int64_t k = begin; k < end; ++k, a += kSquare, b += kSquare) {
          _tile_loadd(4, a, 64);
          _tile_loadd(6, b, 64);
          _tile_dpbf16ps(0, 4, 6);
          _tile_loadd(7, b + kTile, 64);
          _tile_dpbf16ps(1, 4, 7);
          _tile_loadd(5, a + kTile, 64);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, at, row);
      _tile_stored(1, at + 16, row);
      _tile_stored(2, at + 16 * ldc, row);
      _tile_stored(3, at + 16 * ldc + 16, row);
      asm volatile("" ::: "memory");
    }
}

}  // namespace
}  // namespace monograph
