#include "monograph/documents/work_units.h"

#include <algorithm>

namespace monograph {

std::vector<WorkUnit> work_units(std::size_t documents, std::size_t heads,
                                 FunctionRef<std::optional<double>(std::size_t)> work_of) {
  std::vector<WorkUnit> units;
  for (std::size_t d = 0; d < documents; ++d) {
    const std::optional<double> work = work_of(d);
    for (std::size_t h = 0; work && h < heads; ++h) units.push_back({d, h, *work});
  }
  std::stable_sort(units.begin(), units.end(),
                   [](const WorkUnit& a, const WorkUnit& b) { return a.work > b.work; });
  return units;
}

std::size_t count_shared(std::span<const WorkUnit> units, int threads, double share,
                         double smallest) {
  if (threads <= 1) return 0;
  double total = 0;
  for (const WorkUnit& unit : units) total += unit.work;
  const double limit = std::max(smallest, share * total / threads);
  std::size_t count = 0;
  while (count < units.size() && units[count].work > limit) ++count;
  return count;
}

}  // namespace monograph
