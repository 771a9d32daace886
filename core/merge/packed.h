// A merged weight stored in a packed format.
#pragma once

#include <cstdint>

#include "base/function_ref.h"
#include "cpu/parallel.h"
#include "merge/plan.h"
#include "merge/survival.h"
#include "safetensors/writer.h"

namespace monograph {

// Quantises the merged values, writes every tensor of the packed weight, and measures what is left
// of the change: the stored values are read back as a model would read them, with the scales as
// they are stored and rounded to the type the weight was made from. `weight.packed` is set.
Survival merge_packed(const MergedWeight& weight, safetensors::ShardedWriter& writer,
                      ParallelFor parallel_for, FunctionRef<void(std::uint64_t)> done);

}  // namespace monograph
