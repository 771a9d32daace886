// What of the change of one matrix is in the values that are stored.
#pragma once

#include <span>
#include <vector>

#include "monograph/merge/directions.h"
#include "monograph/merge/panels.h"
#include "monograph/merge/survival.h"

namespace monograph {

class Measure {
 public:
  // `matrix` counts those of the panels' range. Finds the directions of its change; there are none
  // where no LoRA changes it, or only by zeros. In the directions of a DoRA that is packed see
  // total_change.h; else they are those of B A.
  Measure(const MergedWeight& weight, const MergedPanels& panels, std::size_t matrix,
          ParallelFor parallel_for);

  const Directions& directions() const { return directions_; }
  // Of whole rows from `row` of the matrix on; leaves the error in `merged`. The parts along the
  // directions are those of all rows for a packed output. For a plain one, whose error is that of
  // its type, some rows stand for all: 64 of a small matrix, every 32nd of a large one.
  Survival operator()(std::size_t row, std::span<const float> base, std::span<double> merged,
                      std::span<const float> stored) const;

 private:
  template <class Value>
  std::vector<double> looked_at(std::size_t row, std::size_t count, Value&& value) const;

  Directions directions_;
  AlongDirections along_;
  bool only_low_rank_;
  std::size_t step_;  // of the rows that are looked at along the directions
};

}  // namespace monograph
