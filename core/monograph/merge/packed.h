// A merged weight stored in a packed format.
#pragma once

#include <cstdint>

#include "monograph/base/function_ref.h"
#include "monograph/cpu/parallel.h"
#include "monograph/merge/plan.h"
#include "monograph/merge/survival.h"
#include "monograph/safetensors/writer.h"

namespace monograph {

// Quantises the merged values to nearest or, by weight.rounding, with error feedback along the
// adapter and the known inputs against the scales that nearest chose, writes every tensor of the
// packed weight, and measures what is left of the change: the stored values are read back as a
// model would read them, with the scales as they are stored and rounded to the type the weight was
// made from. `weight.packed` is set.
Survival merge_packed(const MergedWeight& weight, safetensors::ShardedWriter& writer,
                      ParallelFor parallel_for, FunctionRef<void(std::uint64_t)> done);

// Quantises a weight with error feedback along its inputs; `conversion` is a kQuantize with
// NonFinite::kError.
void quantize_calibrated(const Conversion& conversion, const CalibratedInputs& inputs,
                         safetensors::ShardedWriter& writer, ParallelFor parallel_for);

}  // namespace monograph
