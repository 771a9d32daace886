#include "merge_base.h"

#include <algorithm>
#include <set>

#include "monograph/merge/base_values.h"
#include "monograph/text/utf8.h"
#include "monograph/weights/experts.h"

namespace monograph::cli {
namespace {

using text::in_quotes;

const Weight* first_packed(const Model& model) {
  for (const Weight& weight : model.weights) {
    if (weight.is_packed()) return &weight;
  }
  return nullptr;
}

std::string packing_text(std::string_view format, std::uint64_t block, bool double_quant) {
  return std::string(format) + " with blocks of " + (block == 0 ? "a row" : std::to_string(block)) +
         (double_quant ? " and quantised scales" : " and plain scales");
}

bool has_block_choice(std::string_view format) {
  return format == "nf4" || format == "fp4" || format == "int4" || format == "int8";
}

bool is_of_experts(const Weight& weight) {
  return is_expert_stack(weight) || parse_expert_name(weight.name).has_value();
}

bool has_packed_experts(const Model& model) {
  return std::any_of(model.weights.begin(), model.weights.end(), [](const Weight& weight) {
    return weight.is_packed() && is_of_experts(weight);
  });
}

}  // namespace

std::vector<Adapter> open_adapters(const MergeOptions& options, MergeReport& report) {
  std::vector<GivenAdapter> given;
  for (const std::string& text : options.adapters) given.push_back(parse_adapter(text));
  std::vector<Adapter> adapters;
  for (const GivenAdapter& one : given) {
    adapters.push_back(Adapter::open(one.path));
    report.adapters.push_back({one.path, "", one.weight});
  }
  return adapters;
}

std::vector<WeightedAdapter> weighted(const std::vector<Adapter>& adapters,
                                      const MergeReport& report) {
  std::vector<WeightedAdapter> found;
  for (std::size_t i = 0; i < adapters.size(); ++i) {
    found.push_back({&adapters[i], report.adapters[i].weight});
  }
  return found;
}

void tell_difference(const Adapter& adapter, const std::string& what, const MergeOptions& options,
                     const Session& session) {
  const std::string text = adapter.folder().string() + ": " + what;
  if (!options.force && !options.another_base) {
    throw Error(text + "; --another-base merges all the same");
  }
  session.warn(text);
}

void check_base_choice(const MergeOptions& options, const Model& model) {
  const Weight* packed = first_packed(model);
  if (options.base_weights == "original" && !options.as.empty()) {
    throw UsageError("--as", "is for --base dequantized, the base weights are original");
  }
  if (options.base_weights == "original" && packed != nullptr) {
    throw Error(options.base + ": is quantised (" + std::string(packed->format) +
                "), so it does not have the original weights: give the model it was made from, or "
                "--base dequantized to merge onto the values it stores");
  }
  if (options.base_weights == "dequantized" && packed == nullptr && options.as.empty()) {
    throw Error(options.base +
                ": is not quantised. An adapter trained on quantised weights belongs on them: give "
                "that checkpoint, or say how this one was loaded in training (--as nf4), or use "
                "--base original");
  }
  if (!options.as.empty() && packed != nullptr) {
    throw Error(options.base +
                ": --as is for --base dequantized with a base that is not quantised");
  }
}

void check_experts_choice(const MergeOptions& options, const std::vector<Adapter>& adapters) {
  if (options.as.empty()) {
    if (options.as_experts.empty()) return;
    throw UsageError("--as-experts", "is for --as, which says how the base was loaded");
  }
  const bool changes = std::any_of(adapters.begin(), adapters.end(), [](const Adapter& adapter) {
    return !adapter.config().target_parameters.empty();
  });
  if (!changes || !options.as_experts.empty()) return;
  throw UsageError(
      "--as-experts (an adapter has target_parameters: were they packed or plain in training?) "
      "is required");
}

void take_recorded(MergeOptions& options, const std::vector<Adapter>& adapters,
                   const Model& model) {
  for (const Adapter& adapter : adapters) {
    const RecordedBase& recorded = adapter.recorded_base();
    if (options.base_weights.empty()) options.base_weights = recorded.weights;
    const bool wants = options.base_weights == "dequantized" && options.as.empty() &&
                       first_packed(model) == nullptr && recorded.packed;
    if (!wants) continue;
    options.as = recorded.packed->format;
    if (has_block_choice(recorded.packed->format)) options.as_block = recorded.packed->block;
    options.as_asymmetric = recorded.packed->rule == "minmax";
    options.as_double_quant = recorded.packed->double_quant;
    if (options.as_experts.empty() && recorded.packed->experts) {
      options.as_experts = *recorded.packed->experts ? "packed" : "plain";
    }
  }
  if (options.base_weights.empty()) {
    throw UsageError("--base (no adapter records which weights it was trained on) is required");
  }
}

void take_groups(MergeOptions& options, const Model& model) {
  if (options.to != "int4" && options.to != "int8") return;
  if (options.block || options.asymmetric) return;
  if (options.as == options.to) {
    options.block = options.as_block;
    options.asymmetric = options.as_asymmetric;
  }
  std::set<std::uint64_t> blocks;
  bool rows = true, zeros = false;
  for (const Weight& weight : model.weights) {
    if (!weight.is_packed() || weight.format != options.to || !weight.view) continue;
    blocks.insert(weight.view->block);
    rows = rows && weight.view->block == weight.shape.back();
    zeros = zeros || weight.view->scales.zeros != nullptr;
  }
  if (blocks.empty()) return;
  if (!rows && blocks.size() > 1) {
    throw UsageError("--block-size (weights of the base have groups of " +
                     std::to_string(*blocks.begin()) + " and of " +
                     std::to_string(*blocks.rbegin()) + ") is required");
  }
  options.block = rows ? 0 : *blocks.begin();
  options.asymmetric = zeros;
}

void check_recorded_base(const Adapter& adapter, const std::string& sha256,
                         const MergeOptions& options, const MergeSettings& settings,
                         const Model& model, const Session& session) {
  const RecordedBase& recorded = adapter.recorded_base();
  const auto differs = [&](const std::string& what) {
    tell_difference(adapter, what, options, session);
  };
  if (recorded.packed) {
    const RecordedPacking& packed = *recorded.packed;
    const std::string trained = packing_text(packed.format, packed.block, packed.double_quant);
    const Weight* first = first_packed(model);
    const bool flat = packed.format == "nf4" || packed.format == "fp4";
    std::string given;
    if (first != nullptr) {
      given = packing_text(first->format, flat ? first->block.back() : packed.block,
                           first->double_quant);
    } else if (settings.base_as) {
      given = packing_text(options.as,
                           has_block_choice(packed.format) ? settings.base_block : packed.block,
                           settings.base_double_quant);
    }
    if (!given.empty() && given != trained) {
      differs("was trained on " + trained + ", " +
              (first != nullptr ? "the base is " : "--as says ") + given);
    }
    const bool experts = first != nullptr ? has_packed_experts(model) : settings.base_as_experts;
    if (!given.empty() && packed.experts && *packed.experts != experts) {
      differs(std::string("was trained on ") + (*packed.experts ? "packed" : "plain") +
              " experts, " + (first != nullptr ? "those of the base are " : "--as-experts says ") +
              (experts ? "packed" : "plain"));
    }
    const std::string rule = settings.base_rule == ScaleRule::kMinMax ? "minmax" : "default";
    if (first == nullptr && settings.base_as && packed.rule != rule) {
      differs("was trained with scales by the rule " + in_quotes(packed.rule) +
              ", --as has those of the rule " + in_quotes(rule) + ": give the packed folder");
    }
  }
  const json::Value* config = model.config ? &*model.config : nullptr;
  if (!is_recorded_base(recorded, model.weights, config, sha256)) {
    differs("was trained on the base with hash " + recorded.sha256 + ", this one has " + sha256);
  }
  if (!recorded.weights.empty() && recorded.weights != options.base_weights) {
    differs("was trained on " + recorded.weights + " weights, --base says " + options.base_weights);
  }
}

void check_recorded_values(const std::vector<Adapter>& adapters, const MergeOptions& options,
                           const MergeSettings& settings, const MergePlan& plan,
                           const Session& session, ParallelFor parallel_for) {
  if (!settings.base_as) return;
  // The older formats are known by their folder's hash; of a folder in bf16 that says it all.
  const bool groups = find_format(*settings.base_as)->shape == BlockShape::kGroup;
  const bool bf16 = std::all_of(plan.weights.begin(), plan.weights.end(), [](const auto& weight) {
    return !weight.base_as || source_dtype(*weight.base) == DType::kBFloat16;
  });
  if (!groups && bf16) return;
  std::string found;  // the same for all adapters, and a pass over the base
  for (const Adapter& adapter : adapters) {
    const std::optional<RecordedPacking>& packed = adapter.recorded_base().packed;
    if (!packed || packed->values_sha256.empty()) continue;
    if (found.empty()) found = base_values_sha256(plan, parallel_for);
    if (found == packed->values_sha256) continue;
    tell_difference(adapter,
                    "was trained on packed values with hash " + packed->values_sha256 +
                        ", --as makes others, " + found +
                        ": training has the base in its own type before it is quantised; give the "
                        "packed folder made from a base of that type",
                    options, session);
  }
}

}  // namespace monograph::cli
