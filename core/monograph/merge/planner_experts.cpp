#include <algorithm>

#include "monograph/base/error.h"
#include "monograph/merge/planner.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

using safetensors::shape_text;
using text::in_quotes;

}  // namespace

void Planner::see_stack(MergedWeight& weight, const Weight& stack) {
  weight.experts = stack.shape[0];
  const bool is_transposed = stack.composed != nullptr;  // stored [experts, inputs, outputs]
  const bool dense = !is_packed_in_output(stack);
  if (dense && (is_transposed || (stack.is_packed() && stores_experts_transposed(config_)))) {
    weight.inputs_first = true;
    if (!is_transposed) weight.base = &plan_.views.emplace_back(transposed(stack));
  } else {
    weight.base = &plan_.views.emplace_back(stack);
  }
  weight.shape = weight.base->shape;
}

MergedWeight& Planner::put_together(const Weight& stack) {
  const std::vector<std::string> members = member_names(stack);
  for (const std::string& member : members) {
    if (weights_.at(member).is_changed()) {
      throw Error("weight " + in_quotes(member) + ": is changed on its own and as a part of " +
                  in_quotes(stack.name));
    }
    weights_.erase(member);
  }
  MergedWeight& weight = add_base(stack.name, plan_.views.emplace_back(stack));
  weight.experts = stack.shape[0];
  const bool as_stack = settings_.format && settings_.experts == ExpertsOutput::kStack;
  if (!as_stack) weight.members = members;
  return weight;
}

bool Planner::is_packed_in_output(const Weight& stack) const {
  return settings_.format && (stack.is_packed() || settings_.experts != ExpertsOutput::kKeep);
}

void Planner::add_loras_of_parameters() {
  constexpr std::string_view kWrapped = ".base_layer";
  std::map<std::string, std::vector<const LowRank*>> modules;  // outermost first
  for (const auto& [name, lora] : adapter_->adapter->low_rank()) {
    std::string module = name;
    std::size_t depth = 0;
    for (; module.ends_with(kWrapped); ++depth) module.resize(module.size() - kWrapped.size());
    std::vector<const LowRank*>& list = modules[module];
    list.resize(std::max(list.size(), depth + 1));
    list[depth] = &lora;
  }
  for (const auto& [module, loras] : modules) add_loras_of_module(module, loras);
}

void Planner::add_loras_of_module(const std::string& module,
                                  const std::vector<const LowRank*>& loras) {
  const AdapterConfig& config = adapter_->adapter->config();
  std::vector<std::pair<std::string, const Weight*>> parameters;
  for (const std::string_view name : kExpertParameters) {
    const std::string key = module + "." + std::string(name);
    if (config.targets(key + "_bias")) fail(key + "_bias", "LoRA on a bias is not supported");
    if (!config.targets(key)) continue;
    const Weight* stack = stacks_.find(module, name);
    if (stack != nullptr) parameters.emplace_back(key, stack);
  }
  if (parameters.empty() && loras.size() == 1) {
    for (const std::string& name : {module, module + ".weight"}) {
      const auto refused = stacks_.refused.find(name);
      if (refused != stacks_.refused.end()) fail(name, refused->second);
    }
    return add_lora(module, *loras[0]);
  }
  const auto missing = std::find(loras.begin(), loras.end(), nullptr);
  if (parameters.size() != loras.size() || missing != loras.end()) {
    fail(module, "the adapter has LoRA for " + std::to_string(loras.size()) +
                     " parameters of it, the base has " + std::to_string(parameters.size()) +
                     " that target_parameters names");
  }
  std::vector<FactorShape> shapes;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const LowRank& lora = *loras[loras.size() - 1 - i];
    shapes.push_back({lora.a->shape[1], lora.b->shape[0], &parameters[i].second->shape});
  }
  const std::vector<FactorOrder> orders = factor_orders(shapes);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& [key, stack] = parameters[i];
    add_lora_of_experts(key, *stack, *loras[loras.size() - 1 - i], orders[i]);
  }
}

void Planner::add_lora_of_experts(const std::string& key, const Weight& stack, const LowRank& lora,
                                  FactorOrder order) {
  const AdapterConfig& config = adapter_->adapter->config();
  if (order == FactorOrder::kNeither) {
    fail(key, "A has " + std::to_string(lora.a->shape[1]) + " inputs and B " +
                  std::to_string(lora.b->shape[0]) + " outputs, the experts are " +
                  shape_text(stack.shape));
  }
  if (lora.magnitude != nullptr || lora.bias != nullptr || lora.embedding ||
      config.fan_in_fan_out) {
    fail(key, "only plain LoRA acts on a parameter");
  }
  const std::uint64_t rank = config.rank_of(key), experts = stack.shape[0];
  if (lora.a->shape[0] != rank * experts || lora.b->shape[1] != rank * experts) {
    fail(key, "A has shape " + shape_text(lora.a->shape) + " and B " + shape_text(lora.b->shape) +
                  ", wanted rank " + std::to_string(rank) + " of " + std::to_string(experts) +
                  " experts");
  }
  if (order == FactorOrder::kEither && !config.keeps_order_of_parameters()) {
    fail(key, "its matrices are square and the adapter was written by PEFT " +
                  in_quotes(config.peft_version) +
                  ", so that inputs and outputs cannot be told apart; wanted 0.20 or newer");
  }
  LowRankChange change;
  change.lora = &lora;
  change.factor = config.scale_of(key) * adapter_->weight;
  change.rank = rank;
  change.experts = experts;
  const bool is_transposed = order == FactorOrder::kSwapped;
  const auto stored = weights_.find(stack.name);
  const bool one_by_one =
      settings_.single_experts || (settings_.format && is_packed_in_output(stack));
  if (stored == weights_.end() && one_by_one) {
    return add_lora_one_by_one(stack, change, is_transposed);
  }
  MergedWeight& weight = stored == weights_.end() ? put_together(stack) : stored->second;
  need_float(weight, "LoRA");
  if (weight.replacement != nullptr) fail(weight.name, "is replaced and changed by LoRA");
  change.transposed = is_transposed != weight.inputs_first;
  weight.low_rank.push_back(change);
}

void Planner::add_lora_one_by_one(const Weight& stack, LowRankChange change, bool is_transposed) {
  const std::vector<std::string> members = member_names(stack);
  const std::uint64_t each = members.size() / stack.shape[0];
  for (std::size_t i = 0; i < members.size(); ++i) {
    MergedWeight& weight = weights_.at(members[i]);
    need_float(weight, "LoRA");
    if (weight.replacement != nullptr) fail(weight.name, "is replaced and changed by LoRA");
    change.transposed = is_transposed;
    change.first_expert = i / each;
    const bool in_turns = stack.composed != nullptr && stack.composed->alternate;
    change.first_row = i % each * (in_turns ? 1 : weight.shape[0]);
    change.row_step = in_turns ? each : 1;
    weight.low_rank.push_back(change);
  }
}

}  // namespace monograph
