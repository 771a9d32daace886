// The left operand to AMX tiles, and the tiles of the result to rows of bf16.
#pragma once

#include <immintrin.h>

#include "monograph/kernels/linear/amx_decode.h"
#include "monograph/simd/amx.h"
#include "monograph/simd/unrolled.h"

namespace monograph {

// Groups of 32 columns of up to 16 rows: body(group, rows as 16 vectors), zeros beyond the matrix.
template <class V, class Body>
[[gnu::always_inline]] inline void for_each_tile(const PackJob& job, std::size_t first_row,
                                                 Body body) {
  const Bf16* data = static_cast<const Bf16*>(job.data) + first_row * job.stride + job.begin;
  const std::size_t rows = job.rows - first_row < 16 ? job.rows - first_row : 16;
  const std::size_t whole = rows == 16 ? job.count / 32 * 32 : 0;
  __m512i v[16];
  for (std::size_t c = 0; c < whole; c += 32) {
    unrolled<16>([&](auto i) __attribute__((always_inline)) {
      v[i] = _mm512_loadu_si512(data + i * job.stride + c);
    });
    body(c / 32, v);
  }
  for (std::size_t c = whole; c < job.count; c += 32) {
    const std::size_t left = job.count - c;
    const __mmask32 mask = first_lanes(left);
    unrolled<16>([&](auto i) __attribute__((always_inline)) {
      v[i] = i < rows ? _mm512_maskz_loadu_epi16(mask, data + i * job.stride + c)
                      : _mm512_setzero_si512();
    });
    body(c / 32, v);
  }
}

// Right operand of the tile product: [step][row / 16][pair of columns][row % 16][2], columns in the
// order of the decoded weight.
template <class V>
void pack_forward(const PackJob& job) {
  for (std::size_t row = 0; row < job.rows; row += 16)
    for_each_tile<V>(
        job, row, [&](std::size_t step, __m512i(&v)[16]) __attribute__((always_inline)) {
          unrolled<16>([&](auto i) __attribute__((always_inline)) { v[i] = to_tile_order(v[i]); });
          transpose_16x16(v);
          std::byte* out = job.out + (2 * step + row / 16) * kTileBytes;
          unrolled<16>([&](auto i) __attribute__((always_inline)) {
            _mm512_store_si512(out + 64 * i, v[i]);
          });
        });
}

// Left operand of the tile product: [step][row / 16][row % 16][32].
template <class V>
void pack_dx(const PackJob& job) {
  for (std::size_t row = 0; row < job.rows; row += 16)
    for_each_tile<V>(
        job, row, [&](std::size_t step, __m512i(&v)[16]) __attribute__((always_inline)) {
          std::byte* out = job.out + (2 * step + row / 16) * kTileBytes;
          unrolled<16>([&](auto i) __attribute__((always_inline)) {
            _mm512_store_si512(out + 64 * i, v[i]);
          });
        });
}

// Tiles are [entry][row]: two rows of a tile are rounded to one vector of pairs, which then
// transpose like words of 32 bits. A whole line is written at once: rows of the output are often a
// multiple of 4 KiB apart and share a set of the first-level cache, where half a line would not
// wait for its other half.
template <class V, std::size_t kPanel, bool kGain>
[[gnu::noinline]] void finish_lines(const FinishJob& job) {
  alignas(64) static constexpr std::uint16_t kPairs[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i pairs = _mm512_load_si512(kPairs);
  float bias[kPanel] = {};
  if (job.bias != nullptr)
    for (std::size_t p = 0; p < job.width; ++p)
      bias[p] = to_float(static_cast<const Bf16*>(job.bias)[p]);
  float gain[kGain ? kPanel : 1] = {};
  if constexpr (kGain)
    for (std::size_t p = 0; p < job.width; ++p) gain[p] = job.gain[p];
  for (std::size_t row = 0; row < job.rows; row += 16)
    for (std::size_t p = 0; p < job.width; p += 32) {
      const float* line = job.c + (row / 16 * (kPanel / 16) + p / 16) * 256;
      __m512i v[16];
      unrolled<16>([&](auto i) __attribute__((always_inline)) {
        const float *c = line + 32 * i, *b = bias + p + 2 * i;
        __m512 even = _mm512_load_ps(c), odd = _mm512_load_ps(c + 16);
        if constexpr (kGain) {
          even = _mm512_mul_ps(even, _mm512_set1_ps(gain[p + 2 * i]));
          odd = _mm512_mul_ps(odd, _mm512_set1_ps(gain[p + 2 * i + 1]));
        }
        even = _mm512_add_ps(even, _mm512_set1_ps(b[0]));
        odd = _mm512_add_ps(odd, _mm512_set1_ps(b[1]));
        v[i] = _mm512_permutexvar_epi16(pairs, to_bf16_pair(even, odd));
      });
      transpose_16x16(v);
      Bf16* out = static_cast<Bf16*>(job.out) + row * job.stride + p;
      const std::size_t rows = job.rows - row < 16 ? job.rows - row : 16;
      const __mmask32 mask = first_lanes(job.width - p);
      unrolled<16>([&](auto i) __attribute__((always_inline)) {
        if (i < rows) _mm512_mask_storeu_epi16(out + i * job.stride, mask, v[i]);
      });
    }
}

template <class V, std::size_t kPanel>
[[gnu::always_inline]] inline void finish_forward(const FinishJob& job) {
  if (job.gain == nullptr)
    finish_lines<V, kPanel, /*kGain=*/false>(job);
  else
    finish_lines<V, kPanel, /*kGain=*/true>(job);
}

// Tiles are [row][entry], the sixteen entries in the order that interleaving two decoded rows
// gives.
template <class V, std::size_t kPanel>
[[gnu::noinline]] void finish_dx(const FinishJob& job) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (std::size_t row = 0; row < job.rows; ++row) {
    const float* line = job.c + row / 16 * (kPanel / 16) * 256 + row % 16 * 16;
    Bf16* out = static_cast<Bf16*>(job.out) + row * job.stride;
    for (std::size_t p = 0; p < job.width; p += 32, line += 512)
      _mm512_mask_storeu_epi16(
          out + p, first_lanes(job.width - p),
          to_bf16_pair(_mm512_permutexvar_ps(order, _mm512_load_ps(line)),
                       _mm512_permutexvar_ps(order, _mm512_load_ps(line + 256))));
  }
}

}  // namespace monograph
