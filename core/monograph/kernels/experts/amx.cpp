// Narrow products and sums over tokens on AMX tiles. Compiled with the flags of this instruction
// set and nothing else.
#include "monograph/simd/amx.h"

#include <immintrin.h>

#include "monograph/kernels/experts/tiles.h"
#include "monograph/simd/unrolled.h"

namespace monograph {
namespace {

using V = simd::Amx;

constexpr std::size_t kSteps = 4;  // tiles of columns that are brought together at a time

std::size_t least(std::size_t a, std::size_t b) { return a < b ? a : b; }
__mmask32 lanes_of(std::size_t count) { return first_lanes(static_cast<std::int64_t>(count)); }
__mmask16 floats_of(std::size_t count) {
  return count >= 16 ? __mmask16{0xffff} : static_cast<__mmask16>((1u << count) - 1);
}

void enter() { V::configure(); }
void leave() { V::release(); }

__m512i load_elements(const Bf16* from, std::size_t count) {
  return _mm512_maskz_loadu_epi16(lanes_of(count), from);
}
__m512i load_elements(const float* from, std::size_t count) {
  const __m512 low = _mm512_maskz_loadu_ps(floats_of(count), from);
  const __m512 high =
      count > 16 ? _mm512_maskz_loadu_ps(floats_of(count - 16), from + 16) : _mm512_setzero_ps();
  return _mm512_inserti64x4(_mm512_castsi256_si512(V::to_bf16(low)), V::to_bf16(high), 1);
}

// Sixteen rows of the factor to [step][pair of columns][row][2].
template <class T>
void pack_rows(const NarrowJob& job, std::size_t first, std::size_t ranks, std::byte* out) {
  const std::size_t cols = job.x.cols;
  const T* factor = static_cast<const T*>(job.factor) + first * cols;
  for (std::size_t c = 0; c < cols; c += 32, out += kTileBytes) {
    __m512i v[16];
    for (std::size_t i = 0; i < 16; ++i)
      v[i] = i < ranks ? load_elements(factor + i * cols + c, cols - c) : _mm512_setzero_si512();
    transpose_16x16(v);
    for (std::size_t i = 0; i < 16; ++i) _mm512_store_si512(out + 64 * i, v[i]);
  }
}

// The same of a factor whose rows are the columns of x.
void pack_transposed(const NarrowJob& job, std::size_t first, std::size_t ranks, std::byte* out) {
  const std::size_t cols = job.x.cols;
  const Bf16* factor = static_cast<const Bf16*>(job.factor) + first;
  const auto words = [&](std::size_t c) __attribute__((always_inline)) {
    return c < cols ? _mm512_cvtepu16_epi32(
                          _mm256_maskz_loadu_epi16(floats_of(ranks), factor + c * job.rank))
                    : _mm512_setzero_si512();
  };
  for (std::size_t c = 0; c < (cols + 31) / 32 * 32; c += 2, out += 64)
    _mm512_store_si512(out, _mm512_or_si512(words(c), _mm512_slli_epi32(words(c + 1), 16)));
}

void pack_factor(const NarrowJob& job, std::size_t first, std::size_t ranks, std::byte* out) {
  if (job.kind == NarrowFactor::kColumns) return pack_transposed(job, first, ranks, out);
  if (job.kind == NarrowFactor::kFloats) return pack_rows<float>(job, first, ranks, out);
  pack_rows<Bf16>(job, first, ranks, out);
}

// kSteps tiles of columns of up to 32 rows, from column `first` on, to [step][row][32].
void stage_rows(const NarrowJob& job, std::size_t row, std::size_t rows, std::size_t first,
                std::byte* out) {
  const std::size_t cols = least(32 * kSteps, job.x.cols - first);
  for (std::size_t r = 0; r < rows; ++r) {
    const std::size_t at = job.rows == nullptr ? row + r : job.rows[row + r];
    const Bf16* in = static_cast<const Bf16*>(job.x.data) + at * job.x.stride + first;
    for (std::size_t c = 0; c < cols; c += 32) {
      // Of the next call: rows lie apart, and no prefetcher finds their pieces.
      _mm_prefetch(in + 32 * kSteps + c, _MM_HINT_T0);
      _mm512_store_si512(out + c / 32 * 2 * kTileBytes + r * 64,
                         _mm512_maskz_loadu_epi16(lanes_of(cols - c), in + c));
    }
  }
}

void narrow(const NarrowJob& job) {
  const std::size_t steps = (job.x.cols + 31) / 32;
  std::byte *const stage = job.scratch, *const sums = stage + kSteps * 2 * kTileBytes;
  std::byte* const factor = sums + 2 * kTileBytes;
  for (std::size_t first = 0; first < job.rank; first += 16) {
    const std::size_t ranks = least(16, job.rank - first);
    pack_factor(job, first, ranks, factor);
    for (std::size_t row = 0; row < job.count; row += 32) {
      const std::size_t rows = least(32, job.count - row);
      for (std::size_t i = 0; rows < 32 && i < kSteps * 2 * kTileBytes; i += 64)
        _mm512_store_si512(stage + i, _mm512_setzero_si512());
      _tile_zero(0);
      _tile_zero(1);
      for (std::size_t s = 0; s < steps; s += kSteps) {
        stage_rows(job, row, rows, 32 * s, stage);
        // The tile loads do not tell the compiler that they read memory.
        asm volatile("" ::: "memory");
        for (std::size_t k = 0; k < least(kSteps, steps - s); ++k) {
          const std::byte* left = stage + k * 2 * kTileBytes;
          _tile_loadd(4, factor + (s + k) * kTileBytes, 64);
          _tile_loadd(6, left, 64);
          _tile_dpbf16ps(0, 6, 4);
          _tile_loadd(7, left + kTileBytes, 64);
          _tile_dpbf16ps(1, 7, 4);
        }
      }
      _tile_stored(0, sums, 64);
      _tile_stored(1, sums + kTileBytes, 64);
      asm volatile("" ::: "memory");
      for (std::size_t r = 0; r < rows; ++r) {
        const __m512 scaled =
            _mm512_mul_ps(_mm512_load_ps(sums + r * 64), _mm512_set1_ps(job.scale));
        _mm256_mask_storeu_epi16(static_cast<Bf16*>(job.out) + (row + r) * job.rank + first,
                                 floats_of(ranks), V::to_bf16(scaled));
      }
    }
  }
}

// Sixteen numbers of up to sixteen tokens, to a vector of tokens for each number.
void load_transposed(const SmallTilesJob& job, std::size_t token, std::size_t rank,
                     __m512i (&v)[16]) {
  const __mmask16 mask = floats_of(job.rank - rank);
  for (std::size_t i = 0; i < 16; ++i)
    v[i] = token + i < job.count ? _mm512_castps_si512(_mm512_maskz_loadu_ps(
                                       mask, job.small + (token + i) * job.rank + rank))
                                 : _mm512_setzero_si512();
  transpose_16x16(v);
}

__m512 as_floats(__m256i bf16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
}

// [tokens / 32][rank / 16][number, rest][16][32].
void pack_small(const SmallTilesJob& job) {
  std::byte* out = job.tiles;
  for (std::size_t token = 0; token < job.count; token += 32)
    for (std::size_t rank = 0; rank < job.rank; rank += 16, out += 2 * kTileBytes) {
      for (std::size_t half = 0; half < 2; ++half) {
        __m512i v[16];
        load_transposed(job, token + 16 * half, rank, v);
        for (std::size_t i = 0; i < 16; ++i) {
          const __m512 number = _mm512_castsi512_ps(v[i]);
          const __m256i upper = V::to_bf16(number);
          const __m256i rest = V::to_bf16(_mm512_sub_ps(number, as_floats(upper)));
          std::byte* const to = out + i * 64 + half * 32;
          _mm256_store_si256(reinterpret_cast<__m256i*>(to), upper);
          _mm256_store_si256(reinterpret_cast<__m256i*>(to + kTileBytes), rest);
        }
      }
    }
}

// Pairs of up to 32 rows to four tiles [16 columns][pair of rows][column][2].
void stage_pairs(const GramJob& job, std::size_t token, std::byte* out) {
  alignas(64) static constexpr std::uint16_t kLow[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                         37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                         11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const __mmask32 first = lanes_of(least(32, job.cols));
  const __mmask32 second = job.cols > 32 ? lanes_of(job.cols - 32) : 0;
  const auto row_of = [&](std::size_t t) __attribute__((always_inline)) {
    const std::size_t row = job.rows == nullptr ? t : job.rows[t];
    return static_cast<const Bf16*>(job.large) + row * job.stride;
  };
  for (std::size_t p = 0; p < 16; ++p) {
    const std::size_t t = token + 2 * p;
    __m512i a[2] = {}, b[2] = {};
    if (t < job.count) {
      const Bf16* row = row_of(t);
      _mm_prefetch(row + kTileCols, _MM_HINT_T0);  // as the next columns of this expert want it
      _mm_prefetch(row + kTileCols + 32, _MM_HINT_T0);
      a[0] = _mm512_maskz_loadu_epi16(first, row);
      a[1] = _mm512_maskz_loadu_epi16(second, row + 32);
    }
    if (t + 1 < job.count) {
      const Bf16* row = row_of(t + 1);
      _mm_prefetch(row + kTileCols, _MM_HINT_T0);
      _mm_prefetch(row + kTileCols + 32, _MM_HINT_T0);
      b[0] = _mm512_maskz_loadu_epi16(first, row);
      b[1] = _mm512_maskz_loadu_epi16(second, row + 32);
    }
    unrolled<2>([&](auto i) __attribute__((always_inline)) {
      std::byte* const to = out + 2 * i * kTileBytes + p * 64;
      _mm512_store_si512(to, _mm512_permutex2var_epi16(a[i], low, b[i]));
      _mm512_store_si512(to + kTileBytes, _mm512_permutex2var_epi16(a[i], high, b[i]));
    });
  }
}

void gram(const GramJob& job, const std::byte* tiles, std::byte* scratch) {
  std::byte *const stage = scratch, *const sums = stage + 4 * kTileBytes;
  const std::size_t rank_tiles = (job.rank + 15) / 16;
  for (std::size_t tile = 0; tile < rank_tiles; ++tile) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (std::size_t token = 0; token < job.count; token += 32) {
      const std::byte* small = tiles + (token / 32 * rank_tiles + tile) * 2 * kTileBytes;
      stage_pairs(job, token, stage);
      asm volatile("" ::: "memory");
      _tile_loadd(4, small, 64);
      _tile_loadd(5, small + kTileBytes, 64);
      _tile_loadd(6, stage, 64);
      _tile_loadd(7, stage + kTileBytes, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(0, 5, 6);
      _tile_dpbf16ps(1, 5, 7);
      _tile_loadd(6, stage + 2 * kTileBytes, 64);
      _tile_loadd(7, stage + 3 * kTileBytes, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_dpbf16ps(3, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + kTileBytes, 64);
    _tile_stored(2, sums + 2 * kTileBytes, 64);
    _tile_stored(3, sums + 3 * kTileBytes, 64);
    asm volatile("" ::: "memory");
    for (std::size_t j = 0; j < least(16, job.rank - 16 * tile); ++j)
      for (std::size_t c = 0; c < job.cols; c += 16)
        _mm512_mask_storeu_ps(job.out + (16 * tile + j) * job.out_stride + c,
                              floats_of(job.cols - c),
                              _mm512_load_ps(sums + c / 16 * kTileBytes + j * 64));
  }
}

constexpr ExpertsTiles kTiles = {enter, leave, narrow, pack_small, gram};

}  // namespace

template <class W>
const ExpertsTiles* experts_tiles_variant(DType dtype);

template <>
const ExpertsTiles* experts_tiles_variant<V>(DType dtype) {
  return dtype == DType::kBFloat16 ? &kTiles : nullptr;
}

}  // namespace monograph
