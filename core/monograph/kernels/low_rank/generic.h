// The algorithm, once. Plain loops of constant length over local arrays: GCC and clang turn them
// into vectors of the unit's instruction set.
#pragma once

#include "monograph/kernels/low_rank/low_rank.h"

namespace monograph {

// Rows [row, row + R), columns [col, col + 16).
template <class V, std::size_t R>
[[gnu::always_inline]] inline void low_rank_tile(const LowRankJob& job, std::size_t row,
                                                 std::size_t col) {
  double sum[R][kLowRankTile] = {};
  const double* __restrict right = job.right + col * job.rank;
  const double* left = job.left + row * job.rank;
  for (std::size_t k = 0; k < job.rank; ++k) {
    for (std::size_t r = 0; r < R; ++r) {
      const double factor = left[r * job.rank + k];
      for (std::size_t j = 0; j < kLowRankTile; ++j) {
        sum[r][j] += factor * right[k * kLowRankTile + j];
      }
    }
  }
  const std::size_t width = job.cols - col < kLowRankTile ? job.cols - col : kLowRankTile;
  for (std::size_t r = 0; r < R; ++r) {
    double* out = job.out + (row + r) * job.cols + col;
    if (width == kLowRankTile) {
      for (std::size_t j = 0; j < kLowRankTile; ++j) out[j] += job.scale * sum[r][j];
    } else {
      for (std::size_t j = 0; j < width; ++j) out[j] += job.scale * sum[r][j];
    }
  }
}

template <class V>
void add_low_rank_with(const LowRankJob& job, std::size_t rows) {
  // A strip of `right` stays in the first cache while all rows pass over it.
  for (std::size_t col = 0; col < job.cols; col += kLowRankTile) {
    std::size_t row = 0;
    for (; row + 4 <= rows; row += 4) low_rank_tile<V, 4>(job, row, col);
    for (; row < rows; ++row) low_rank_tile<V, 1>(job, row, col);
  }
}

}  // namespace monograph
