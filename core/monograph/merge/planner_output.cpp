#include <algorithm>
#include <utility>

#include "monograph/base/error.h"
#include "monograph/merge/planner.h"
#include "monograph/quant_methods/packed_parts.h"
#include "monograph/quant_methods/skip_reason.h"
#include "monograph/text/utf8.h"
#include "monograph/weights/model_settings.h"
#include "monograph/weights/vocabulary.h"

namespace monograph {
namespace {

using text::in_quotes;

// Whether the class that the config names has a head at all.
bool has_head(const json::Value& config) {
  const json::Value* classes = config.find("architectures");
  if (classes == nullptr) return true;
  return std::any_of(classes->items().begin(), classes->items().end(), [](const json::Value& name) {
    return name.text().find("LM") != std::string::npos ||
           name.text().find("ConditionalGeneration") != std::string::npos;
  });
}

}  // namespace

MergePlan Planner::finish() {
  untie_if_needed();
  check_vocabulary();
  if (settings_.base_as && settings_.base_as_experts) {
    for (const Weight& stack : stacks_.stacks) {
      if (!weights_.contains(stack.name)) put_together(stack);
    }
    if (!stacks_.refused.empty()) {
      const auto& [name, why] = *stacks_.refused.begin();
      throw Error("experts " + in_quotes(name) + " cannot be quantised as a stack: " + why);
    }
  }
  std::size_t kept_plain = 0;
  for (auto& [name, weight] : weights_) {
    set_type(weight);
    kept_plain += settings_.format && packs_linears_ && !weight.packed && weight.experts == 0 &&
                  !weight.base->is_packed() && skip_reason(*weight.base).empty();
    if (weight.new_rows != 0 && (weight.packed || weight.base_as)) {
      throw Error("weight " + in_quotes(name) + ": has rows of new tokens and is packed; wanted " +
                  "an output whose embedding and head are not");
    }
    plan_.weights.push_back(std::move(weight));
  }
  if (kept_plain != 0) {
    plan_.notes.push_back(std::to_string(kept_plain) + " weights of linear layers are not " +
                          "packed in the base and stay so");
  }
  if (settings_.rounding == Rounding::kCalibrated && plan_.calibrated == 0) {
    throw Error(settings_.calibration->file().string() + ": has the inputs of none of the " +
                std::to_string(plan_.not_calibrated) + " packed weights");
  }
  return std::move(plan_);
}

void Planner::untie_if_needed() {
  const MergedWeight* embedding = find_embedding();
  MergedWeight* head = nullptr;
  for (auto& [name, weight] : weights_) {
    if (is_head(name)) head = &weight;
  }
  const bool tied = made_head_ || config_says_tied(config_) ||
                    (head == nullptr && embedding != nullptr && has_head(config_));
  const bool embedding_changed = embedding != nullptr && embedding->is_changed();
  const bool head_changed = head != nullptr && head->is_changed();
  if (!tied || (!embedding_changed && !head_changed)) return;
  if (!head_changed && keeps_tie_) return;
  if (head_changed && trained_tokens_) {
    fail(head->name, "is changed, and so are single tokens of the embedding it shares");
  }
  if (head == nullptr) {
    // Names of checkpoints of transformers: the head stands at the top.
    head = &add_base("lm_head.weight", *embedding->base);
  }
  plan_.unties_head = true;
  plan_.notes.emplace_back(
      "input embedding and head were one tensor in the base; the adapter "
      "changes them apart, so both are written and tie_word_embeddings is "
      "false");
}

void Planner::check_vocabulary() const {
  if (plan_.vocabulary == 0) return;
  for (const auto& [name, weight] : weights_) {
    if (!has_vocabulary(name) || weight.shape[0] == plan_.vocabulary) continue;
    fail(name, "has " + std::to_string(weight.shape[0]) + " rows, and the adapter has a " +
                   "vocabulary of " + std::to_string(plan_.vocabulary) +
                   " tokens: the new rows of both embedding and head must be trained");
  }
}

bool Planner::is_packed(const MergedWeight& weight, bool linear) const {
  if (weight.experts != 0) return is_packed_in_output(*weight.base);
  if (!linear) {
    return settings_.experts == ExpertsOutput::kSeparate && skip_reason(*weight.base) == "expert";
  }
  // As OpenAI ships it, gpt-oss in MXFP4 has packed experts and 16-bit linear layers.
  const bool experts_alone =
      gpt_oss_ && *settings_.format == Format::kMxfp4 &&
      std::any_of(stacks_.stacks.begin(), stacks_.stacks.end(),
                  [&](const Weight& stack) { return is_packed_in_output(stack); });
  return weight.base->is_packed() || !(experts_alone || packs_linears_);
}

const Weight* Planner::outputs_first(const MergedWeight& weight) {
  if (!weight.inputs_first) return weight.base;
  return &plan_.views.emplace_back(transposed(*weight.base));
}

void Planner::set_type(MergedWeight& weight) {
  const std::optional<DType> of_base = float_type(weight.base->dtype);
  const bool is_float = weight.base->is_packed() || of_base.has_value();
  if (!is_float) {
    if (settings_.base_as && skip_reason(*weight.base).empty()) {
      throw Error("weight " + in_quotes(weight.name) + ": is " + std::string(weight.base->format) +
                  ", which is never loaded in a packed format; wanted fp32, bf16 or fp16");
    }
    return;
  }
  const bool linear = weight.base->is_packed() || skip_reason(*weight.base).empty();
  const bool stored = weight.name == weight.base->name;
  if (settings_.base_as && stored && (weight.experts != 0 ? settings_.base_as_experts : linear)) {
    weight.base_as = Conversion{.weight = outputs_first(weight),
                                .action = Action::kQuantize,
                                .format = *settings_.base_as,
                                .block = settings_.base_block,
                                .rule = settings_.base_rule,
                                .double_quant = settings_.base_double_quant,
                                .stack = weight.experts != 0 ? Stack::kOwn : Stack::kNone};
    fit_groups(*weight.base_as);
  }
  if (settings_.format && stored && weight.members.empty() && is_packed(weight, linear)) {
    const bool gpt_oss = gpt_oss_ && *settings_.format == Format::kMxfp4;
    weight.packed = Conversion{.weight = weight.base,
                               .action = Action::kQuantize,
                               .format = *settings_.format,
                               .block = settings_.block,
                               .rule = settings_.rule,
                               .double_quant = settings_.double_quant,
                               .stack = weight.experts == 0 ? Stack::kNone
                                        : gpt_oss           ? Stack::kGptOss
                                                            : Stack::kOwn};
    fit_groups(*weight.packed);
    set_rounding(weight);
    return;
  }
  weight.dtype = settings_.dtype ? settings_.dtype : of_base;
  const bool same = !weight.base->is_packed() && weight.dtype == of_base;
  if (same && !weight.is_changed() && !weight.base_as) weight.dtype.reset();
}

void Planner::set_rounding(MergedWeight& weight) {
  if (settings_.rounding == Rounding::kNearest) return;
  if (!weight.low_rank.empty()) weight.rounding = Rounding::kAdapter;
  if (settings_.rounding != Rounding::kCalibrated) return;
  // Rows of a weight with fan_in_fan_out are inputs, feedback runs along columns.
  const bool is_transposed = std::any_of(
      weight.low_rank.begin(), weight.low_rank.end(),
      [](const LowRankChange& change) { return change.transposed && change.experts == 1; });
  if (!is_transposed) weight.inputs = settings_.calibration->find(weight.name, weight.shape.back());
  ++(weight.inputs != nullptr ? plan_.calibrated : plan_.not_calibrated);
  if (weight.inputs != nullptr) weight.rounding = Rounding::kCalibrated;
}

}  // namespace monograph
