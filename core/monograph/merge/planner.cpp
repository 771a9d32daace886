#include "monograph/merge/planner.h"

#include <utility>

#include "monograph/base/error.h"
#include "monograph/text/utf8.h"
#include "monograph/weights/vocabulary.h"

namespace monograph {
namespace {

using safetensors::LocatedTensor;
using safetensors::shape_text;
using text::in_quotes;

}  // namespace

Planner::Planner(const std::vector<Weight>& weights, const json::Value& config,
                 const MergeSettings& settings)
    : config_(config), settings_(settings), stacks_(stack_experts(weights, config)) {
  for (const Weight& weight : weights) {
    add_base(weight.name, weight);
    packs_linears_ = packs_linears_ || (weight.is_packed() && !is_expert_stack(weight) &&
                                        !parse_expert_name(weight.name));
  }
  gpt_oss_ = is_gpt_oss(config);
  for (const Weight& stack : stacks_.stacks) {
    const auto stored = weights_.find(stack.name);
    if (stored != weights_.end()) {
      see_stack(stored->second, stack);
    } else if (settings.format && settings.experts == ExpertsOutput::kStack) {
      put_together(stack);
    }
  }
}

void Planner::apply(const WeightedAdapter& adapter) {
  adapter_ = &adapter;
  keeps_tie_ = keeps_tie_ || adapter.adapter->config().ensure_weight_tying;
  for (const auto& [tensor, with] : adapter.adapter->replacements()) replace(tensor, with);
  if (adapter.adapter->config().target_parameters.empty()) {
    for (const auto& [module, lora] : adapter.adapter->low_rank()) add_lora(module, lora);
  } else {
    add_loras_of_parameters();
  }
  for (const auto& [tensor, rows] : adapter.adapter->token_rows()) set_tokens(tensor, rows);
}

void Planner::fail(std::string_view tensor, const std::string& what) const {
  throw Error(adapter_->adapter->folder().string() + ": for weight " + in_quotes(tensor) + ": " +
              what);
}

MergedWeight& Planner::add_base(const std::string& name, const Weight& base) {
  MergedWeight& weight = weights_[name];
  weight.name = name;
  weight.shape = base.shape;
  weight.base = &base;
  return weight;
}

MergedWeight& Planner::find(const std::string& name) {
  const auto found = weights_.find(name);
  if (found != weights_.end()) return found->second;
  if (const auto router = weights_.find(stored_router(name)); router != weights_.end()) {
    return router->second;
  }
  const MergedWeight* embedding = is_head(name) ? find_embedding() : nullptr;
  if (embedding == nullptr) fail(name, "the base has no such weight");
  made_head_ = true;
  return add_base(name, *embedding->base);
}

const MergedWeight* Planner::find_embedding() const {
  const MergedWeight* found = nullptr;
  for (const auto& [name, weight] : weights_) {
    if (!is_input_embedding(name)) continue;
    if (found != nullptr) return nullptr;  // which one would be a guess
    found = &weight;
  }
  return found;
}

void Planner::need_float(const MergedWeight& weight, const char* what) const {
  if (weight.base->is_packed() || float_type(weight.base->dtype)) return;
  fail(weight.name, std::string(what) + " cannot be applied to " +
                        std::string(weight.base->format) +
                        ", wanted fp32, bf16, fp16 or a packed format");
}

void Planner::need_weight_one(std::string_view tensor, const char* what) const {
  if (adapter_->weight != 1) {
    fail(tensor, std::string(what) + " cannot be weighted; its adapter has weight " +
                     std::to_string(adapter_->weight));
  }
}

void Planner::replace(const std::string& name, const LocatedTensor& with) {
  MergedWeight& weight = find(name);
  need_float(weight, "a replaced weight");
  need_weight_one(name, "a replaced weight");
  if (weight.is_changed()) fail(name, "another adapter changes it too, this one replaces it");
  std::vector<std::uint64_t> shape = with.entry->shape;
  if (has_vocabulary(name)) {
    plan_.trains_vocabulary = adapter_->adapter;
    if (shape.size() == 2 && weight.shape.size() == 2 && shape[0] > weight.shape[0]) {
      add_rows(weight, shape[0] - weight.shape[0]);
    }
  }
  if (shape != weight.shape) {
    fail(name, "the adapter replaces it by shape " + shape_text(with.entry->shape) +
                   ", the base has " + shape_text(weight.shape));
  }
  weight.replacement = &with;
  replaced_by_[name] = adapter_->adapter;
}

bool Planner::has_vocabulary(std::string_view name) {
  return is_input_embedding(name) || is_head(name);
}

void Planner::add_rows(MergedWeight& weight, std::uint64_t count) {
  weight.new_rows += count;
  weight.shape[0] += count;
  if (count != 0) plan_.vocabulary = weight.shape[0];
}

void Planner::add_lora(const std::string& module, const LowRank& lora) {
  MergedWeight& weight = find(module + ".weight");
  if (!lora.has_rank()) {
    fail(weight.name, "A has shape " + shape_text(lora.a->shape) + " and B " +
                          shape_text(lora.b->shape) + ", but the config gives it rank " +
                          std::to_string(lora.rank));
  }
  const auto& a = lora.a->shape;
  const auto& b = lora.b->shape;
  const bool transposed = lora.embedding || adapter_->adapter->config().fan_in_fan_out;
  std::vector<std::uint64_t> wanted = {b[0], a[1]};
  if (transposed) std::swap(wanted[0], wanted[1]);
  if (weight.shape != wanted) {
    fail(weight.name,
         "B * A has shape " + shape_text(wanted) + ", the weight has " + shape_text(weight.shape));
  }
  need_float(weight, lora.magnitude != nullptr ? "DoRA" : "LoRA");
  const auto replaced = replaced_by_.find(weight.name);
  const bool replaced_elsewhere =
      replaced != replaced_by_.end() && replaced->second != adapter_->adapter;
  const bool has_dora =
      !weight.low_rank.empty() && weight.low_rank.front().lora->magnitude != nullptr;
  if (weight.tokens != nullptr || replaced_elsewhere || has_dora ||
      (lora.magnitude != nullptr && !weight.low_rank.empty())) {
    fail(weight.name, "several adapters change it, and not all of them are plain LoRA");
  }
  if (lora.magnitude != nullptr) need_weight_one(weight.name, "DoRA");
  const double factor = lora.scale * adapter_->weight;
  weight.low_rank.push_back({&lora, factor, transposed, lora.rank});
  if (lora.bias != nullptr) add_bias(module, lora, factor);
}

void Planner::add_bias(const std::string& module, const LowRank& lora, double factor) {
  const auto found = weights_.find(module + ".bias");
  if (found == weights_.end()) {
    fail(module + ".bias", "lora_bias was trained, but the layer of the base has no bias");
  }
  MergedWeight& bias = found->second;
  if (bias.elements() != lora.bias->elements || bias.shape.size() != 1) {
    fail(bias.name, "has shape " + shape_text(bias.shape) + ", lora_B.bias has " +
                        shape_text(lora.bias->shape));
  }
  need_float(bias, "lora_bias");
  if (bias.replacement != nullptr) fail(bias.name, "is replaced and changed by lora_bias");
  bias.biases.push_back({&lora, factor});
}

void Planner::set_tokens(const std::string& name, const TokenRows& rows) {
  MergedWeight& weight = find(name);
  need_float(weight, "trained tokens");
  need_weight_one(name, "trained tokens");
  if (weight.is_changed()) fail(name, "trained tokens, and another change of the same weight");
  const auto& shape = rows.rows.entry->shape;
  if (weight.shape.size() != 2 || weight.shape[1] != shape[1]) {
    fail(name, "trained tokens have " + std::to_string(shape[1]) + " columns, the weight is " +
                   shape_text(weight.shape));
  }
  const NewRows added = rows_of_new_tokens(rows.tokens, weight.shape[0]);
  if (!added.missing.empty()) fail(name, added.missing);
  add_rows(weight, added.count);
  weight.tokens = &rows;
  plan_.trains_vocabulary = adapter_->adapter;
  keeps_tie_ = trained_tokens_ = true;
}

}  // namespace monograph
