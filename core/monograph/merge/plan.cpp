#include "monograph/merge/plan.h"

#include "monograph/base/error.h"
#include "monograph/merge/planner.h"
#include "monograph/quant_methods/packed_parts.h"
#include "monograph/text/utf8.h"

namespace monograph {

std::string_view MergedWeight::change() const {
  if (!low_rank.empty()) return low_rank.front().lora->magnitude != nullptr ? "dora" : "lora";
  if (tokens != nullptr) return "tokens";
  if (replacement != nullptr) return "replaced";
  return biases.empty() ? "" : "bias";
}

std::vector<safetensors::TensorSpec> MergePlan::specs() const {
  std::vector<safetensors::TensorSpec> specs;
  for (const MergedWeight& weight : weights) {
    if (weight.packed) {
      for (auto& spec : specs_of(*weight.packed)) specs.push_back(std::move(spec));
      continue;
    }
    const auto dtype = weight.dtype ? stored(*weight.dtype) : weight.base->dtype;
    if (weight.members.empty()) specs.push_back({weight.name, dtype, weight.shape});
    const std::uint64_t rows =
        weight.members.empty() ? 0 : weight.experts * weight.shape[1] / weight.members.size();
    for (const std::string& member : weight.members) {
      specs.push_back({member, dtype, {rows, weight.shape[2]}});
    }
  }
  return specs;
}

MergePlan plan_merge(const std::vector<Weight>& weights, const json::Value& config,
                     std::span<const WeightedAdapter> adapters, const MergeSettings& settings) {
  for (const Weight& weight : weights) {
    if (weight.is_packed() && !weight.is_readable()) {
      throw Error("weight " + text::in_quotes(weight.name) + ": cannot decode " +
                  std::string(weight.format) + " (" + std::string(weight.quant_method) + ")");
    }
    const bool groups =
        settings.format && find_format(*settings.format)->shape == BlockShape::kGroup;
    if (groups && !weight.columns.empty()) {
      throw Error("weight " + text::in_quotes(weight.name) +
                  ": its columns are sorted by group (act-order), and the groups of " +
                  std::string(written_name(*settings.format)) +
                  " are neighbours; wanted an output of bf16, fp16 or fp32");
    }
  }
  Planner planner(weights, config, settings);
  for (const WeightedAdapter& adapter : adapters) planner.apply(adapter);
  return planner.finish();
}

}  // namespace monograph
