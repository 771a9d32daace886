#include "monograph/merge/total_change.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace monograph {
namespace {

// Sums over panels are kept apart in this many pieces, whatever the number of threads.
constexpr std::size_t kPieces = 8;
constexpr std::size_t kMaxCombinations = 64;

// 64 signs that depend on the row alone: the output of SplitMix64.
std::uint64_t signs_of(std::size_t row) {
  std::uint64_t z = (row + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// body(row of the matrix, change) for every kPieces-th panel from `piece` on.
template <class Body>
void each_change(const MergedPanels& panels, std::size_t matrix, std::size_t piece, Body&& body) {
  std::vector<float> base;
  std::vector<double> change;
  const std::size_t count = panels.panels_of_matrix();
  for (std::size_t i = piece; i < count; i += kPieces) {
    const std::size_t panel = matrix * count + i;
    const std::size_t first = panels.first_row(panel), last = panels.last_row(panel);
    panels.read_base(first, last, base);
    panels.merge(first, last, base, change);
    for (std::size_t j = 0; j < change.size(); ++j) change[j] -= base[j];
    body(first - panels.first_row(matrix * count), change);
  }
}

// cols x combinations sums of the rows of the change with random signs.
std::vector<double> combinations_of(const MergedPanels& panels, std::size_t matrix,
                                    std::size_t combinations, ParallelFor parallel_for) {
  const std::size_t cols = panels.cols(), size = cols * combinations;
  std::vector<double> pieces(kPieces * size);
  parallel_for(kPieces, 1, [&](std::size_t piece, std::size_t end) {
    for (; piece < end; ++piece) {
      double* sums = pieces.data() + piece * size;
      each_change(panels, matrix, piece, [&](std::size_t row, const std::vector<double>& change) {
        for (std::size_t at = 0; at < change.size(); at += cols, ++row) {
          const std::uint64_t signs = signs_of(row);
          for (std::size_t k = 0; k < combinations; ++k) {
            const double sign = (signs >> k & 1) != 0 ? 1.0 : -1.0;
            double* sum = sums + k * cols;
            for (std::size_t j = 0; j < cols; ++j) sum[j] += sign * change[at + j];
          }
        }
      });
    }
  });
  std::vector<double> out(size);
  for (std::size_t k = 0; k < combinations; ++k) {
    for (std::size_t j = 0; j < cols; ++j) {
      double& sum = out[j * combinations + k];
      for (std::size_t piece = 0; piece < kPieces; ++piece) {
        sum += pieces[piece * size + k * cols + j];
      }
    }
  }
  return out;
}

// An orthonormal basis of the columns of cols x rank values, each taken at length 1.
Directions basis_of(std::vector<double> values, std::size_t cols, std::size_t rank,
                    ParallelFor parallel_for) {
  for (std::size_t k = 0; k < rank; ++k) {
    double squares = 0;
    for (std::size_t j = 0; j < cols; ++j) squares += values[j * rank + k] * values[j * rank + k];
    const double factor = squares > 0 ? 1 / std::sqrt(squares) : 0;
    for (std::size_t j = 0; j < cols; ++j) values[j * rank + k] *= factor;
  }
  LowRankFactors factors{rank, cols, rank, std::vector<double>(rank * rank), std::move(values)};
  for (std::size_t k = 0; k < rank; ++k) factors.left[k * rank + k] = 1;
  return find_directions(factors, parallel_for);
}

}  // namespace

Directions total_change_directions(const MergedPanels& panels, std::size_t matrix,
                                   ParallelFor parallel_for) {
  const LowRankFactors lora = panels.low_rank_factors(matrix);
  const std::size_t cols = panels.cols(), extra = std::min(lora.rank, kMaxCombinations);
  const std::vector<double> combined = combinations_of(panels, matrix, extra, parallel_for);
  const std::size_t rank = lora.rank + extra;
  std::vector<double> candidates(cols * rank);
  for (std::size_t j = 0; j < cols; ++j) {
    std::copy_n(lora.right.data() + j * lora.rank, lora.rank, candidates.data() + j * rank);
    std::copy_n(combined.data() + j * extra, extra, candidates.data() + j * rank + lora.rank);
  }
  Directions basis = basis_of(std::move(candidates), cols, rank, parallel_for);
  const std::size_t count = basis.count();
  const AlongDirections along(basis);
  LowRankFactors change{panels.matrix_rows(), cols, count, {}, std::move(basis.v)};
  change.left.resize(change.rows * count);
  parallel_for(kPieces, 1, [&](std::size_t piece, std::size_t end) {
    for (; piece < end; ++piece) {
      each_change(panels, matrix, piece, [&](std::size_t row, const std::vector<double>& values) {
        along.project(values, change.left.data() + row * count);
      });
    }
  });
  return find_directions(change, parallel_for);
}

}  // namespace monograph
