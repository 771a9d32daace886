// Documents and heads as units of work for threads: one unit is one head of one document, and none
// needs another's result. Small units run on one thread each; a kernel cuts the largest itself.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "monograph/base/function_ref.h"

namespace monograph {

struct WorkUnit {
  std::size_t document, head;
  double work;
};

// `heads` units per document, largest first, so that the last ones to be taken are short.
// work_of(d) is nullopt for a document with nothing to do.
std::vector<WorkUnit> work_units(std::size_t documents, std::size_t heads,
                                 FunctionRef<std::optional<double>(std::size_t)> work_of);

// How many units at the front are so large that one thread each would leave the others waiting:
// more work than `smallest` and than `share` of what a thread has on average.
std::size_t count_shared(std::span<const WorkUnit> units, int threads, double share,
                         double smallest);

}  // namespace monograph
