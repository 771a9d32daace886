// linear on a GPU for few rows, straight from the packed weight:
//   y[M,N] = gain[N] * (x[M,K] * W[N,K]^T + u[M,r] * B[N,r]^T) + bias[N]
// A weight is what `dequantize` gives, rounded to the type of the activations. Sums are fp32, in an
// order that follows from K and r alone; gain and bias meet them unrounded; the result is rounded
// once. A row of y has the same bits whatever the other rows are, as long as the same kernel runs:
// the SIMT kernel to 8 rows, the mma kernel (16-bit types) to 64.
#pragma once

#include "monograph/gpu/decode.h"

namespace monograph::gpu {

// Views of the device's memory. x, u and y have rows `stride` elements apart; b is contiguous.
template <class T>
struct FewRowsJob {
  PackedView weight;  // [N, K]
  unsigned rows;      // M, at least 1
  const T* x;
  std::size_t x_stride;
  std::size_t rank;  // 0 for no low-rank part
  const T* u;
  std::size_t u_stride;
  const T* b;         // [N, rank]
  const T* bias;      // [N], or nullptr
  const float* gain;  // [N], or nullptr
  T* y;
  std::size_t y_stride;
};

template <class T>
MONOGRAPH_DEVICE void finish_element(const FewRowsJob<T>& job, std::size_t row, std::size_t n,
                                     float sum) {
  if (job.gain != nullptr) sum = mul(read(job.gain + n), sum);
  if (job.bias != nullptr) sum = add(sum, widen(read(job.bias + n)));
  write(job.y + row * job.y_stride + n, round_to<T>(sum));
}

// Eight elements of a row of activations from `col` on, zeros behind `end`.
template <class T>
MONOGRAPH_DEVICE void read_row_piece(const T* row, bool whole, std::size_t col, std::size_t end,
                                     float (&out)[kPiece]) {
  if (whole && col + kPiece <= end) {
    if constexpr (std::is_same_v<T, float>) {
      MONOGRAPH_UNROLL
      for (unsigned half = 0; half < 2; ++half) {
        const Words4 words = read_as<Words4>(row + col + 4 * half);
        MONOGRAPH_UNROLL
        for (unsigned i = 0; i < 4; ++i) out[4 * half + i] = as_float(words.word[i]);
      }
    } else {
      const Words4 words = read_as<Words4>(row + col);
      MONOGRAPH_UNROLL
      for (unsigned i = 0; i < kPiece; ++i)
        out[i] = widen(T{static_cast<std::uint16_t>(words.word[i / 2] >> 16 * (i % 2))});
    }
    return;
  }
  MONOGRAPH_UNROLL
  for (unsigned i = 0; i < kPiece; ++i) out[i] = col + i < end ? widen(read(row + col + i)) : 0.0f;
}

// ---- to 8 rows: a warp for each row of the weight ----

inline constexpr unsigned kSimtThreads = 128;
inline constexpr unsigned kSimtCols = kSimtThreads / kLanes;  // rows of the weight, of a block
inline constexpr unsigned kSimtRows = 8;
constexpr std::size_t linear_simt_blocks(std::size_t n) { return ceil_div(n, kSimtCols); }

// kRows is 1, 2, 4 or 8 and at least job.rows. A lane sums pieces of eight 256 apart, then its part
// of the rank; the lanes are summed as a tree.
template <class F, class T, unsigned kRows>
MONOGRAPH_KERNEL_BLOCKS(kSimtThreads, kRows == 8 ? 5 : 8)
linear_simt_kernel(FewRowsJob<T> job) {
  DecodeTable& table = shared_memory<DecodeTable>();
  fill_table<F>(table);
  sync_threads();
  const unsigned lane = thread_index() % kLanes;
  const std::size_t n = std::size_t{block_index_x()} * kSimtCols + thread_index() / kLanes;
  if (n >= job.weight.rows) return;
  const std::size_t depth = job.weight.cols;
  const WeightRow row = weight_row<F>(job.weight, n);
  const bool whole_x = is_aligned(job.x, 16) && job.x_stride % kPiece == 0;
  float sums[kRows];
  MONOGRAPH_UNROLL
  for (unsigned m = 0; m < kRows; ++m) sums[m] = 0.0f;
  for (std::size_t k = lane * kPiece; k < depth; k += kLanes * kPiece) {
    float w[kPiece];
    decode_row_piece<F, T>(job.weight, table, row, k, depth, w);
    MONOGRAPH_UNROLL
    for (unsigned i = 0; i < kPiece; ++i) w[i] = widen(round_to<T>(w[i]));
    MONOGRAPH_UNROLL
    for (unsigned m = 0; m < kRows; ++m) {
      if (m >= job.rows) continue;
      float x[kPiece];
      read_row_piece(job.x + m * job.x_stride, whole_x, k, depth, x);
      MONOGRAPH_UNROLL
      for (unsigned i = 0; i < kPiece; ++i) sums[m] = fma(x[i], w[i], sums[m]);
    }
  }
  for (std::size_t r = lane; r < job.rank; r += kLanes) {
    const float b = widen(read(job.b + n * job.rank + r));
    MONOGRAPH_UNROLL
    for (unsigned m = 0; m < kRows; ++m)
      if (m < job.rows) sums[m] = fma(widen(read(job.u + m * job.u_stride + r)), b, sums[m]);
  }
  MONOGRAPH_UNROLL
  for (unsigned m = 0; m < kRows; ++m) {
    MONOGRAPH_UNROLL
    for (unsigned mask = kLanes / 2; mask != 0; mask /= 2)
      sums[m] = add(sums[m], shuffle_xor(sums[m], mask));
    if (lane == m && m < job.rows) finish_element(job, m, n, sums[m]);
  }
}

// ---- to 64 rows: mma on tiles of 16 ----

inline constexpr unsigned kMmaThreads = 128;
inline constexpr unsigned kMmaCols = kMmaThreads / kLanes * 8;  // rows of the weight, of a block
inline constexpr unsigned kMmaRows = 64;
inline constexpr unsigned kMmaDepth = 64;  // of a step
constexpr std::size_t linear_mma_blocks(std::size_t n) { return ceil_div(n, kMmaCols); }

// Rows of 144 bytes: the eight lanes that read 16 bytes at once meet no bank twice.
template <unsigned kTiles>
struct alignas(16) MmaShared {
  std::uint16_t left[2][16 * kTiles][kMmaDepth + 8];
  DecodeTable table;
};

// The activations of a step into shared memory, by all threads; zeros behind rows and columns.
template <class T, unsigned kTiles>
MONOGRAPH_DEVICE void fetch_left(std::uint16_t (&to)[16 * kTiles][kMmaDepth + 8], const T* from,
                                 std::size_t stride, unsigned rows, std::size_t begin,
                                 std::size_t end) {
  const bool whole = is_aligned(from, 16) && (stride | end) % kPiece == 0;
  for (unsigned i = thread_index(); i < 16 * kTiles * (kMmaDepth / kPiece); i += kMmaThreads) {
    const unsigned row = i / (kMmaDepth / kPiece), col = i % (kMmaDepth / kPiece) * kPiece;
    const T* at = from + row * stride + begin + col;
    if (whole) {
      const bool inside = row < rows && begin + col < end;
      copy_async(&to[row][col], inside ? at : from, /*zeros=*/!inside);
    } else {
      for (unsigned k = 0; k < kPiece; ++k)
        write(&to[row][col + k],
              row < rows && begin + col + k < end ? read(at + k).bits : std::uint16_t{0});
    }
  }
}

// kTiles is 1, 2 or 4; 16 kTiles is at least job.rows. A warp has eight rows of the weight; the
// lanes g = lane / 4, t = lane % 4 decode sixteen neighbours of row g from 16 t on, straight into
// the fragments of four products: the sum over k does not ask for its order, and the activations
// are read in the same one.
template <class F, class T, unsigned kTiles>
MONOGRAPH_KERNEL_BLOCKS(kMmaThreads, 4)
linear_mma_kernel(FewRowsJob<T> job) {
  auto& shared = shared_memory<MmaShared<kTiles>>();
  fill_table<F>(shared.table);
  const unsigned lane = thread_index() % kLanes, g = lane / 4, t = lane % 4;
  const std::size_t first = std::size_t{block_index_x()} * kMmaCols + thread_index() / kLanes * 8;
  const std::size_t n = first + g;
  const std::size_t depth = job.weight.cols;
  const bool has_row = n < job.weight.rows;
  const WeightRow weight = weight_row<F>(job.weight, has_row ? n : 0);
  const std::size_t steps = ceil_div(depth, std::size_t{kMmaDepth});
  const std::size_t all_steps = steps + ceil_div(job.rank, std::size_t{kMmaDepth});
  const auto fetch = [&](std::size_t step) {
    auto& to = shared.left[step % 2];
    if (step < steps)
      fetch_left<T, kTiles>(to, job.x, job.x_stride, job.rows, step * kMmaDepth, depth);
    else if (step < all_steps)
      fetch_left<T, kTiles>(to, job.u, job.u_stride, job.rows, (step - steps) * kMmaDepth,
                            job.rank);
    close_group();
  };
  float sums[kTiles][4];
  MONOGRAPH_UNROLL
  for (unsigned tile = 0; tile < kTiles; ++tile) MONOGRAPH_UNROLL
  for (unsigned i = 0; i < 4; ++i) sums[tile][i] = 0.0f;
  fetch(0);
  for (std::size_t step = 0; step < all_steps; ++step) {
    sync_threads();  // the table is there, and nobody reads the other stage any more
    fetch(step + 1);
    std::uint32_t right[8];
    MONOGRAPH_UNROLL
    for (unsigned half = 0; half < 2; ++half) {
      float w[kPiece];
      const std::size_t k = 16 * t + kPiece * half;
      if (!has_row) {
        MONOGRAPH_UNROLL
        for (unsigned i = 0; i < kPiece; ++i) w[i] = 0.0f;
      } else if (step < steps) {
        decode_row_piece<F, T>(job.weight, shared.table, weight, step * kMmaDepth + k, depth, w);
      } else {
        read_row_piece(job.b + n * job.rank, /*whole=*/false, (step - steps) * kMmaDepth + k,
                       job.rank, w);
      }
      MONOGRAPH_UNROLL
      for (unsigned i = 0; i < 4; ++i) right[4 * half + i] = pack_two<T>(w[2 * i], w[2 * i + 1]);
    }
    wait_for_groups<1>();
    sync_threads();
    MONOGRAPH_UNROLL
    for (unsigned tile = 0; tile < kTiles; ++tile) MONOGRAPH_UNROLL
    for (unsigned half = 0; half < 2; ++half) {
      const auto& left = shared.left[step % 2];
      const unsigned col = 16 * t + kPiece * half;
      const Words4 upper = read_as<Words4>(&left[16 * tile + g][col]);
      const Words4 lower = read_as<Words4>(&left[16 * tile + g + 8][col]);
      MONOGRAPH_UNROLL
      for (unsigned i = 0; i < 2; ++i) {
        const std::uint32_t a[4] = {upper.word[2 * i], lower.word[2 * i], upper.word[2 * i + 1],
                                    lower.word[2 * i + 1]};
        const std::uint32_t b[2] = {right[4 * half + 2 * i], right[4 * half + 2 * i + 1]};
        mma<T>(sums[tile], a, b);
      }
    }
  }
  wait_for_groups<0>();
  MONOGRAPH_UNROLL
  for (unsigned tile = 0; tile < kTiles; ++tile) MONOGRAPH_UNROLL
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = 16 * tile + g + i / 2 * 8;
    const std::size_t col = first + 2 * t + i % 2;
    if (row < job.rows && col < job.weight.rows) finish_element(job, row, col, sums[tile][i]);
  }
}

}  // namespace monograph::gpu
