// The directions of the row space of a low-rank change, and how rounding keeps errors out of them.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "monograph/cpu/parallel.h"
#include "monograph/kernels/feedback_rounding/feedback_rounding.h"
#include "monograph/merge/calibration.h"

namespace monograph {

// A change left * right^T of one matrix.
struct LowRankFactors {
  std::size_t rows = 0, cols = 0, rank = 0;
  std::vector<double> left;   // rows x rank
  std::vector<double> right;  // cols x rank
};

// V and S of the change U S V^T. Those of less than 10^-6 of the largest S are left out; the Gram
// matrices that it is computed from do not tell them from rounding.
struct Directions {
  std::size_t cols = 0;
  std::vector<double> s;  // descending
  std::vector<double> v;  // cols x count()

  std::size_t count() const { return s.size(); }
};

// In fp64, from the Gram matrices of both factors: rank x rank. The same bits for any number of
// threads. A change of zeros has no directions.
Directions find_directions(const LowRankFactors& factors, ParallelFor parallel_for);

// How much more an error along the strongest direction weighs than one across, for each column and
// direction: mu. From 100 to 10,000 the results are the same within their noise; also beside the
// moments of inputs, where less loses small changes (docs/reference/decisions.md).
inline constexpr double kFeedbackStrength = 1000;

// H = I + G G^T with column j of G = V_j * S_j / S_0 * sqrt(mu * cols / count). With `inputs`,
// which may be null, their g comes before these columns and their d for I. One of the two is not
// empty.
FeedbackRows feedback_along(const Directions& directions, const InputMoments* inputs);

// The parts along V of rows x cols values.
class AlongDirections {
 public:
  explicit AlongDirections(const Directions& directions);
  // rows x count values; `out` holds zeros.
  void project(std::span<const double> values, double* out) const;
  double sum_of_squares(std::span<const double> values) const;

 private:
  std::size_t cols_, count_;
  std::vector<double> tiles_;  // V in the layout of LowRankJob
};

}  // namespace monograph
