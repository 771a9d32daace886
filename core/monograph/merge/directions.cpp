#include "monograph/merge/directions.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "monograph/kernels/low_rank/low_rank.h"
#include "monograph/merge/symmetric_eigen.h"

namespace monograph {
namespace {

constexpr std::size_t kGrain = 16;
constexpr double kSmallest = 1e-6;

// rows x cols values in the layout of LowRankJob.
std::vector<double> tiles_of(const std::vector<double>& values, std::size_t rows,
                             std::size_t cols) {
  std::vector<double> tiles((cols + kLowRankTile - 1) / kLowRankTile * rows * kLowRankTile);
  for (std::size_t i = 0; i < rows; ++i) {
    for (std::size_t j = 0; j < cols; ++j) {
      tiles[(j / kLowRankTile * rows + i) * kLowRankTile + j % kLowRankTile] = values[i * cols + j];
    }
  }
  return tiles;
}

// left * right for `rows` x inner and inner x cols values; each sum runs in the order of `inner`.
std::vector<double> multiplied(const std::vector<double>& left, const std::vector<double>& right,
                               std::size_t rows, std::size_t inner, std::size_t cols,
                               ParallelFor parallel_for) {
  const std::vector<double> tiles = tiles_of(right, inner, cols);
  std::vector<double> out(rows * cols);
  parallel_for(rows, kGrain, [&](std::size_t begin, std::size_t end) {
    add_low_rank(
        {left.data() + begin * inner, tiles.data(), inner, cols, 1.0, out.data() + begin * cols},
        end - begin);
  });
  return out;
}

std::vector<double> transposed(const std::vector<double>& x, std::size_t rows, std::size_t cols) {
  std::vector<double> out(x.size());
  for (std::size_t i = 0; i < rows; ++i) {
    for (std::size_t j = 0; j < cols; ++j) out[j * rows + i] = x[i * cols + j];
  }
  return out;
}

// matrix^T matrix of rows x rank.
std::vector<double> gram(const std::vector<double>& matrix, std::size_t rows, std::size_t rank,
                         ParallelFor parallel_for) {
  return multiplied(transposed(matrix, rows, rank), matrix, rank, rows, rank, parallel_for);
}

bool all_finite(const std::vector<double>& values) {
  return std::all_of(values.begin(), values.end(), [](double x) { return std::isfinite(x); });
}

}  // namespace

// With left^T left = Q^T L Q the change has the right singular vectors of X = sqrt(L) Q right^T,
// and X X^T = sqrt(L) Q (right^T right) Q^T sqrt(L) = U^T S^2 U: V^T = U X / S.
Directions find_directions(const LowRankFactors& factors, ParallelFor parallel_for) {
  const std::size_t rank = factors.rank, cols = factors.cols;
  std::vector<double> of_left = gram(factors.left, factors.rows, rank, parallel_for);
  const std::vector<double> right = gram(factors.right, cols, rank, parallel_for);
  // Of a broken adapter; the merge names the place.
  if (!all_finite(of_left) || !all_finite(right)) return {cols, {}, {}};
  SymmetricEigen left = symmetric_eigen(std::move(of_left), rank);
  std::vector<double>& map = left.vectors;  // sqrt(L) Q
  for (std::size_t i = 0; i < rank; ++i) {
    const double root = std::sqrt(std::max(left.values[i], 0.0));
    for (std::size_t j = 0; j < rank; ++j) map[i * rank + j] *= root;
  }
  const auto times = [&](const std::vector<double>& x, const std::vector<double>& y) {
    return multiplied(x, y, rank, rank, rank, parallel_for);
  };
  const SymmetricEigen both =
      symmetric_eigen(times(times(map, right), transposed(map, rank, rank)), rank);
  Directions directions{cols, {}, {}};
  for (const double square : both.values) {
    const double s = std::sqrt(std::max(square, 0.0));
    if (!(s > 0) || (!directions.s.empty() && s < kSmallest * directions.s.front())) break;
    directions.s.push_back(s);
  }
  const std::size_t count = directions.count();
  std::vector<double> whole = transposed(times(both.vectors, map), rank, rank);
  for (std::size_t k = 0; k < rank; ++k) {
    for (std::size_t d = 0; d < count; ++d) whole[k * count + d] = whole[k * rank + d];
  }
  whole.resize(rank * count);
  directions.v = multiplied(factors.right, whole, cols, rank, count, parallel_for);
  for (std::size_t i = 0; i < cols; ++i) {
    for (std::size_t d = 0; d < count; ++d) directions.v[i * count + d] /= directions.s[d];
  }
  return directions;
}

FeedbackRows feedback_along(const Directions& directions, const InputMoments* inputs) {
  const std::size_t count = directions.count(), before = inputs == nullptr ? 0 : inputs->count;
  const std::size_t cols = inputs == nullptr ? directions.cols : inputs->d.size();
  const std::size_t all = before + count;
  const double whole =
      count == 0
          ? 0
          : std::sqrt(kFeedbackStrength * static_cast<double>(cols) / static_cast<double>(count));
  std::vector<double> g(cols * all);
  for (std::size_t i = 0; i < cols; ++i) {
    double* row = g.data() + i * all;
    for (std::size_t k = 0; k < before; ++k) row[k] = inputs->g[i * before + k];
    for (std::size_t k = 0; k < count; ++k) {
      row[before + k] =
          directions.v[i * count + k] * (directions.s[k] / directions.s.front() * whole);
    }
  }
  return feedback_rows(g, inputs == nullptr ? std::vector<double>(cols, 1.0) : inputs->d, all);
}

AlongDirections::AlongDirections(const Directions& directions)
    : cols_(directions.cols),
      count_(directions.count()),
      tiles_(tiles_of(directions.v, cols_, count_)) {}

void AlongDirections::project(std::span<const double> values, double* out) const {
  add_low_rank({values.data(), tiles_.data(), cols_, count_, 1.0, out}, values.size() / cols_);
}

double AlongDirections::sum_of_squares(std::span<const double> values) const {
  std::vector<double> along(values.size() / cols_ * count_);
  project(values, along.data());
  double sum = 0;
  for (const double x : along) sum += x * x;
  return sum;
}

}  // namespace monograph
