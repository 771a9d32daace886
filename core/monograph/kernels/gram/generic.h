// Tiles and sums, once for every SIMD vocabulary.
#pragma once

#include "monograph/base/float_types.h"
#include "monograph/kernels/gram/gram.h"
#include "monograph/simd/row_walk.h"
#include "monograph/simd/unrolled.h"

namespace monograph {

template <class V, class T>
struct GramSums {
  using L = RowLanes<V>;
  using W = RowWalk<V>;
  using F32 = typename L::F32;
  static constexpr std::size_t kLanes = W::kLanes, kVectors = 2, kCols = kVectors * kLanes;
  static_assert(kGramStrip % kCols == 0);
  // Sums of two vectors that the registers hold, and that are enough to hide a multiply-add.
  static constexpr std::size_t kTiles = kLanes == 16 ? 2 : 1;

  static void pack(const GramTiles& job, std::size_t begin, std::size_t end) {
    for (std::size_t first = 0; first < job.rank; first += kGramTile) {
      float* tile = job.tiles + first * job.tokens + begin * kGramTile;
      const T* row = static_cast<const T*>(job.narrow) + begin * job.stride + first;
      const std::size_t count = job.rank - first < kGramTile ? job.rank - first : kGramTile;
      for (std::size_t t = begin; t < end; ++t, row += job.stride, tile += kGramTile)
        for (std::size_t i = 0; i < kGramTile; ++i) tile[i] = i < count ? to_float(row[i]) : 0.f;
    }
  }

  // Columns of one pair of vectors, for 4 n rows of the sums.
  template <std::size_t n, class X>
  [[gnu::always_inline]] static void add_tiles(const GramBlock& job, const float* tiles,
                                               const X* wide, std::size_t stride, float* sums) {
    constexpr std::size_t kRows = n * kGramTile;
    F32 sum[kRows][kVectors];
    unrolled<kRows * kVectors>([&](auto i) __attribute__((always_inline)) {
      sum[i / kVectors][i % kVectors] =
          L::load(sums + i / kVectors * job.sums_stride + i % kVectors * kLanes);
    });
    for (std::size_t t = 0; t < job.tokens; ++t, wide += stride, tiles += kGramTile) {
      F32 x[kVectors];
      unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
        x[v] = L::load_as(wide + v * kLanes);
      });
      unrolled<kRows>([&](auto i) __attribute__((always_inline)) {
        const F32 factor = L::set(tiles[i / kGramTile * job.tile_stride + i % kGramTile]);
        unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
          sum[i][v] = L::fused(factor, x[v], sum[i][v]);
        });
      });
    }
    unrolled<kRows * kVectors>([&](auto i) __attribute__((always_inline)) {
      L::store(sums + i / kVectors * job.sums_stride + i % kVectors * kLanes,
               sum[i / kVectors][i % kVectors]);
    });
  }

  template <class X>
  [[gnu::noinline]] static void add_columns(const GramBlock& job, const X* wide, std::size_t stride,
                                            float* sums) {
    std::size_t tile = 0;
    const float* tiles = job.tiles;
    const std::size_t rows = kGramTile * job.sums_stride;
    for (; tile + kTiles <= job.tile_count; tile += kTiles) {
      add_tiles<kTiles>(job, tiles, wide, stride, sums);
      tiles += kTiles * job.tile_stride;
      sums += kTiles * rows;
    }
    if (tile < job.tile_count) add_tiles<1>(job, tiles, wide, stride, sums);
  }

  static void add(const GramBlock& job) {
    const T* const wide = static_cast<const T*>(job.wide);
    alignas(64) float buffer[kGramTokens * kCols];
    for (std::size_t col = 0; col < job.cols; col += kCols) {
      const std::size_t count = job.cols - col < kCols ? job.cols - col : kCols;
      // Converted once if several passes read it.
      if (count == kCols && (sizeof(T) == 4 || job.tile_count <= kTiles)) {
        add_columns(job, wide + col, job.stride, job.sums + col);
        continue;
      }
      const T* row = wide + col;
      for (std::size_t t = 0; t < job.tokens; ++t, row += job.stride)
        for (std::size_t v = 0; v < kVectors; ++v) {
          const std::size_t at = v * kLanes;
          L::store(buffer + t * kCols + at,
                   at < count ? W::load(row + at, W::lanes_left(count - at)) : L::set(0.f));
        }
      add_columns<float>(job, buffer, kCols, job.sums + col);
    }
  }

  static void store(const GramStore& job) {
    T* const out = static_cast<T*>(job.out);
    if (!job.turned) {
      for (std::size_t i = 0; i < job.rows; ++i)
        W::each_alone(
            job.cols, [&](std::size_t j, std::size_t count) __attribute__((always_inline)) {
              W::store(out + i * job.out_stride + j, W::load(job.in + i * job.in_stride + j, count),
                       count);
            });
      return;
    }
    constexpr std::size_t kSide = 16;
    float turned[kSide];
    for (std::size_t first = 0; first < job.rows; first += kSide) {
      const std::size_t rows = job.rows - first < kSide ? job.rows - first : kSide;
      for (std::size_t j = 0; j < job.cols; ++j) {
        const float* const in = job.in + first * job.in_stride + j;
        for (std::size_t i = 0; i < rows; ++i) turned[i] = in[i * job.in_stride];
        W::each_alone(
            rows, [&](std::size_t i, std::size_t count) __attribute__((always_inline)) {
              W::store(out + j * job.out_stride + first + i, W::load(turned + i, count), count);
            });
      }
    }
  }
};

template <class V, class T>
inline constexpr GramKernels kGramKernels = {GramSums<V, T>::pack, GramSums<V, T>::add,
                                             GramSums<V, T>::store};

template <class V>
const GramKernels* gram_variant(DType dtype) {
  return with_type(
      dtype, []<class T>() __attribute__((always_inline)) { return &kGramKernels<V, T>; });
}

}  // namespace monograph
