// The base of a merge: what the options and the adapters say of it, and what it is.
#pragma once

#include <string>
#include <vector>

#include "merge_options.h"
#include "merge_report.h"
#include "model.h"
#include "monograph/adapter/adapter.h"
#include "monograph/merge/merge.h"

namespace monograph::cli {

// The adapters that the options name; the report gets a line for each.
std::vector<Adapter> open_adapters(const MergeOptions& options, MergeReport& report);
// With their weights. `adapters` must outlive it.
std::vector<WeightedAdapter> weighted(const std::vector<Adapter>& adapters,
                                      const MergeReport& report);

// Of an adapter that records another base: an Error unless another base is wanted, then a warning.
void tell_difference(const Adapter& adapter, const std::string& what, const MergeOptions& options,
                     const Session& session);

// --base must say which weights the adapter was trained on, and BASE must have them.
void check_base_choice(const MergeOptions& options, const Model& model);

// An adapter that changes experts was trained on packed or on plain ones.
void check_experts_choice(const MergeOptions& options, const std::vector<Adapter>& adapters);

// What an adapter records and the command line does not say.
void take_recorded(MergeOptions& options, const std::vector<Adapter>& adapters, const Model& model);

// --to int4 or int8 without --block-size and --asymmetric: both as a base of that format has them,
// packed or by --as.
void take_groups(MergeOptions& options, const Model& model);

// What the adapter says of its base against what was given.
void check_recorded_base(const Adapter& adapter, const std::string& sha256,
                         const MergeOptions& options, const MergeSettings& settings,
                         const Model& model, const Session& session);

// With --as: whether the base becomes the values that each adapter records. It does not where
// training had it in another type before it was quantised.
void check_recorded_values(const std::vector<Adapter>& adapters, const MergeOptions& options,
                           const MergeSettings& settings, const MergePlan& plan,
                           const Session& session, ParallelFor parallel_for);

}  // namespace monograph::cli
