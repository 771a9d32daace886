// The values of a base that is quantised in memory, told by their hash.
#pragma once

#include <string>

#include "monograph/cpu/parallel.h"
#include "monograph/merge/plan.h"

namespace monograph {

// RecordedPacking::values_sha256 of the weights with base_as, experts apart. It quantises each.
std::string base_values_sha256(const MergePlan& plan, ParallelFor parallel_for);

}  // namespace monograph
