#include "monograph/merge/measure.h"

#include <algorithm>

#include "monograph/merge/total_change.h"

namespace monograph {
namespace {

// The order of the sums is part of the result and the same everywhere.
constexpr std::size_t kLanes = 4;
// Of the rows of a plain output that are looked at along the directions: about so many of a matrix,
// but no fewer than one of so many.
constexpr std::size_t kPlainRows = 64, kPlainStep = 32;

bool is_dora(const MergedWeight& weight) {
  return !weight.low_rank.empty() && weight.low_rank.front().lora->magnitude != nullptr;
}

struct Sums {
  double intended[kLanes] = {}, realised[kLanes] = {}, product[kLanes] = {}, base[kLanes] = {},
         error[kLanes] = {};

  void add(std::size_t lane, double of_base, double& merged, double stored) {
    const double wanted = merged - of_base, found = stored - of_base;
    merged = stored - merged;
    intended[lane] += wanted * wanted;
    realised[lane] += found * found;
    product[lane] += wanted * found;
    base[lane] += of_base * of_base;
    error[lane] += merged * merged;
  }
};

double whole(const double* lanes) { return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]); }

Directions directions_of(const MergedWeight& weight, const MergedPanels& panels, std::size_t matrix,
                         ParallelFor parallel_for) {
  if (weight.low_rank.empty()) return {};
  if (is_dora(weight) && weight.packed) {
    return total_change_directions(panels, matrix, parallel_for);
  }
  return find_directions(panels.low_rank_factors(matrix), parallel_for);
}

}  // namespace

Measure::Measure(const MergedWeight& weight, const MergedPanels& panels, std::size_t matrix,
                 ParallelFor parallel_for)
    : directions_(directions_of(weight, panels, matrix, parallel_for)),
      along_(directions_),
      only_low_rank_(weight.replacement == nullptr && !weight.low_rank.empty() && !is_dora(weight)),
      step_(weight.packed
                ? 1
                : std::clamp<std::size_t>(panels.matrix_rows() / kPlainRows, 1, kPlainStep)) {}

// value(i) of the rows that are looked at; i < count counts the elements of whole rows.
template <class Value>
std::vector<double> Measure::looked_at(std::size_t row, std::size_t count, Value&& value) const {
  std::vector<double> values;
  const std::size_t cols = directions_.cols;
  for (std::size_t i = (step_ - row % step_) % step_ * cols; i < count; i += step_ * cols) {
    for (std::size_t j = i; j < i + cols; ++j) values.push_back(value(j));
  }
  return values;
}

Survival Measure::operator()(std::size_t row, std::span<const float> base, std::span<double> merged,
                             std::span<const float> stored) const {
  const bool has_directions = directions_.count() != 0;
  const double all = static_cast<double>(step_);
  double meant_along = 0;
  if (has_directions && !only_low_rank_) {
    const auto meant = [&](std::size_t at) { return merged[at] - base[at]; };
    meant_along = all * along_.sum_of_squares(looked_at(row, merged.size(), meant));
  }
  Sums sums;
  std::size_t i = 0;
  for (; i + kLanes <= merged.size(); i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      sums.add(lane, base[i + lane], merged[i + lane], stored[i + lane]);
    }
  }
  for (; i < merged.size(); ++i) sums.add(i % kLanes, base[i], merged[i], stored[i]);
  Survival survival{whole(sums.intended), whole(sums.realised), whole(sums.product),
                    whole(sums.base),     whole(sums.error),    whole(sums.intended)};
  if (has_directions) {
    const auto error = [&](std::size_t at) { return merged[at]; };
    survival.error_along = step_ == 1
                               ? along_.sum_of_squares(merged)
                               : all * along_.sum_of_squares(looked_at(row, merged.size(), error));
    // What a LoRA means lies in its directions.
    if (!only_low_rank_) survival.meant_along = meant_along;
  } else if (only_low_rank_) {
    survival.error_along = 0;  // a LoRA of zeros reads no direction
  }
  return survival;
}

}  // namespace monograph
