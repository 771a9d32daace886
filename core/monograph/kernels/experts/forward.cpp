#include <cstring>

#include "monograph/kernels/experts/layer.h"

namespace monograph {

void experts(const ExpertsProblem& problem, void* y, void* pre, ParallelFor parallel_for) {
  const ExpertsLayer layer(problem, parallel_for);
  const std::size_t row = problem.up.out * layer.element();
  Buffer own;
  if (pre == nullptr) own = layer.places_by(problem.up.out);
  void* const sorted = pre == nullptr ? own.data() : pre;
  if (pre != nullptr) prefer_huge_pages(pre, problem.all_slots() * row);
  layer.compute_pre(layer.up.low_rank(layer.x()), sorted);
  if (pre != nullptr)
    std::memset(static_cast<std::byte*>(pre) + layer.kept() * row, 0,
                (problem.all_slots() - layer.kept()) * row);
  const Buffer h = layer.activate(sorted);
  own = {};
  const ExpertsRows rows = layer.rows(h.data(), layer.inner());
  const Buffer u2 = layer.down.low_rank(rows);
  const float* const weights = problem.slot_rows == nullptr ? layer.slot_weights.data() : nullptr;
  layer.sum_slots(problem.down.out, weights, y,
                  [&](std::size_t first_col, const MutableMatrix& strip) {
                    layer.down.forward(rows, u2, first_col, strip);
                  });
}

}  // namespace monograph
