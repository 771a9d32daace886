#include "monograph/kernels/experts/routing.h"

#include "monograph/kernels/linear/products.h"

namespace monograph {

Routing sort_slots(const ExpertsProblem& problem) {
  Routing routing;
  const std::size_t all = problem.all_slots();
  const auto in_range = [&](std::size_t slot) {
    return static_cast<std::uint64_t>(problem.ids[slot]) < problem.experts;
  };
  std::vector<std::uint32_t> next(problem.experts);  // first a count, then where the next one goes
  for (std::size_t slot = 0; slot < all; ++slot)
    if (in_range(slot)) ++next[static_cast<std::size_t>(problem.ids[slot])];
  std::uint32_t kept = 0;
  for (std::size_t e = 0; e < problem.experts; ++e) {
    const std::uint32_t rows = next[e];
    next[e] = kept;
    if (rows == 0) continue;
    routing.active.push_back(static_cast<std::uint32_t>(e));
    routing.offsets.push_back(kept);
    kept += rows;
  }
  routing.offsets.push_back(kept);
  routing.slots.resize(kept);
  routing.tokens.resize(kept);
  routing.places.assign(all, kSkippedRow);
  for (std::size_t slot = 0; slot < all; ++slot) {
    if (!in_range(slot)) continue;
    const std::uint32_t place = next[static_cast<std::size_t>(problem.ids[slot])]++;
    routing.slots[place] = static_cast<std::uint32_t>(slot);
    routing.tokens[place] = static_cast<std::uint32_t>(
        problem.slot_rows == nullptr ? slot / problem.slots : problem.slot_rows[slot]);
    routing.places[slot] = place;
  }
  return routing;
}

}  // namespace monograph
