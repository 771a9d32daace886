// Runs a plan: streams every weight of the output through the writer, panel by panel.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/base/function_ref.h"
#include "monograph/cpu/parallel.h"
#include "monograph/merge/plan.h"
#include "monograph/merge/survival.h"
#include "monograph/safetensors/writer.h"

namespace monograph {

struct MergeRow {
  std::string name;
  std::string_view change;  // as MergedWeight::change
  std::string format;       // of the output: "bf16", "nf4"
  Survival survival;
};

// Each stored value is the fp64 result of MergedPanels rounded once, to nearest even. Products are
// exact; the fp64 sum over the rank may differ from the exact value by rank * 2^-52 of its terms,
// so only a result that close to the middle of two stored values could round the other way. The
// same bits for any number of threads and on every instruction set. Memory: about 2 MB a thread and
// the factors of one LoRA.
//
// Returns a row for each changed weight, by name. `done` is called with the bytes written, from any
// thread, and may throw to stop.
std::vector<MergeRow> run_merge(const MergePlan& plan, safetensors::ShardedWriter& writer,
                                ParallelFor parallel_for, FunctionRef<void(std::uint64_t)> done);

}  // namespace monograph
