#include "monograph/merge/plan.h"

#include <algorithm>
#include <map>
#include <utility>

#include "monograph/adapter/factor_order.h"
#include "monograph/base/error.h"
#include "monograph/quant_methods/skip_reason.h"
#include "monograph/text/utf8.h"
#include "monograph/weights/experts.h"
#include "monograph/weights/model_settings.h"
#include "monograph/weights/vocabulary.h"

namespace monograph {
namespace {

using safetensors::LocatedTensor;
using safetensors::shape_text;
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

class Planner {
 public:
  Planner(const std::vector<Weight>& weights, const json::Value& config,
          const MergeSettings& settings)
      : config_(config), settings_(settings), stacks_(stack_experts(weights, config)) {
    for (const Weight& weight : weights) add_base(weight.name, weight);
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

  void apply(const WeightedAdapter& adapter) {
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

  MergePlan finish() {
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
    for (auto& [name, weight] : weights_) {
      set_type(weight);
      if (weight.new_rows != 0 && (weight.packed || weight.base_as)) {
        throw Error("weight " + in_quotes(name) +
                    ": has rows of new tokens and is packed; wanted " +
                    "an output whose embedding and head are not");
      }
      plan_.weights.push_back(std::move(weight));
    }
    if (settings_.rounding == Rounding::kCalibrated && plan_.calibrated == 0) {
      throw Error(settings_.calibration->file().string() + ": has the inputs of none of the " +
                  std::to_string(plan_.not_calibrated) + " packed weights");
    }
    return std::move(plan_);
  }

 private:
  [[noreturn]] void fail(std::string_view tensor, const std::string& what) const {
    throw Error(adapter_->adapter->folder().string() + ": for weight " + in_quotes(tensor) + ": " +
                what);
  }

  MergedWeight& add_base(const std::string& name, const Weight& base) {
    MergedWeight& weight = weights_[name];
    weight.name = name;
    weight.shape = base.shape;
    weight.base = &base;
    return weight;
  }

  // Whether the output has the stack in a packed format.
  bool is_packed_in_output(const Weight& stack) const {
    return settings_.format && (stack.is_packed() || settings_.experts != ExpertsOutput::kKeep);
  }

  // A stack that the base stores as one tensor: packed with outputs for rows, plain as the model's
  // class has it.
  void see_stack(MergedWeight& weight, const Weight& stack) {
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

  // A stack that the base stores one by one, as one weight: written as such, or apart again.
  MergedWeight& put_together(const Weight& stack) {
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

  // PEFT wraps a module once for each of its parameters, in their order.
  void add_loras_of_parameters() {
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

  void add_loras_of_module(const std::string& module, const std::vector<const LowRank*>& loras) {
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

  void add_lora_of_experts(const std::string& key, const Weight& stack, const LowRank& lora,
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
    if (stored == weights_.end() && settings_.format && is_packed_in_output(stack)) {
      return add_lora_one_by_one(stack, change, is_transposed);
    }
    MergedWeight& weight = stored == weights_.end() ? put_together(stack) : stored->second;
    need_float(weight, "LoRA");
    if (weight.replacement != nullptr) fail(weight.name, "is replaced and changed by LoRA");
    change.transposed = is_transposed != weight.inputs_first;
    weight.low_rank.push_back(change);
  }

  // To the matrices of a stack, which are packed each on its own.
  void add_lora_one_by_one(const Weight& stack, LowRankChange change, bool is_transposed) {
    const std::vector<std::string> members = member_names(stack);
    const std::uint64_t each = members.size() / stack.shape[0];
    for (std::size_t i = 0; i < members.size(); ++i) {
      MergedWeight& weight = weights_.at(members[i]);
      need_float(weight, "LoRA");
      if (weight.replacement != nullptr) fail(weight.name, "is replaced and changed by LoRA");
      change.transposed = is_transposed;
      change.first_expert = i / each;
      change.first_row = i % each * weight.shape[0];
      weight.low_rank.push_back(change);
    }
  }

  // The weight that an adapter names; a head that is not stored is made from the embedding.
  MergedWeight& find(const std::string& name) {
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

  const MergedWeight* find_embedding() const {
    const MergedWeight* found = nullptr;
    for (const auto& [name, weight] : weights_) {
      if (!is_input_embedding(name)) continue;
      if (found != nullptr) return nullptr;  // which one would be a guess
      found = &weight;
    }
    return found;
  }

  // A weight of any other type is copied, so what an adapter does to it would be lost.
  void need_float(const MergedWeight& weight, const char* what) const {
    if (weight.base->is_packed() || float_type(weight.base->dtype)) return;
    fail(weight.name, std::string(what) + " cannot be applied to " +
                          std::string(weight.base->format) +
                          ", wanted fp32, bf16, fp16 or a packed format");
  }

  void need_weight_one(std::string_view tensor, const char* what) const {
    if (adapter_->weight != 1) {
      fail(tensor, std::string(what) + " cannot be weighted; its adapter has weight " +
                       std::to_string(adapter_->weight));
    }
  }

  void replace(const std::string& name, const LocatedTensor& with) {
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

  static bool has_vocabulary(std::string_view name) {
    return is_input_embedding(name) || is_head(name);
  }

  void add_rows(MergedWeight& weight, std::uint64_t count) {
    weight.new_rows += count;
    weight.shape[0] += count;
    if (count != 0) plan_.vocabulary = weight.shape[0];
  }

  // Embedding and head of a vocabulary that grew, which must have grown alike.
  void check_vocabulary() const {
    if (plan_.vocabulary == 0) return;
    for (const auto& [name, weight] : weights_) {
      if (!has_vocabulary(name) || weight.shape[0] == plan_.vocabulary) continue;
      fail(name, "has " + std::to_string(weight.shape[0]) + " rows, and the adapter has a " +
                     "vocabulary of " + std::to_string(plan_.vocabulary) +
                     " tokens: the new rows of both embedding and head must be trained");
    }
  }

  void add_lora(const std::string& module, const LowRank& lora) {
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
      fail(weight.name, "B * A has shape " + shape_text(wanted) + ", the weight has " +
                            shape_text(weight.shape));
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

  void add_bias(const std::string& module, const LowRank& lora, double factor) {
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

  void set_tokens(const std::string& name, const TokenRows& rows) {
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

  void untie_if_needed() {
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

  // Whether the output has the weight in settings.format.
  bool is_packed(const MergedWeight& weight, bool linear) const {
    if (weight.experts != 0) return is_packed_in_output(*weight.base);
    if (!linear) {
      return settings_.experts == ExpertsOutput::kSeparate && skip_reason(*weight.base) == "expert";
    }
    // As OpenAI ships it, gpt-oss in MXFP4 has packed experts and 16-bit linear layers.
    const bool experts_alone =
        gpt_oss_ && *settings_.format == Format::kMxfp4 &&
        std::any_of(stacks_.stacks.begin(), stacks_.stacks.end(),
                    [&](const Weight& stack) { return is_packed_in_output(stack); });
    return !experts_alone || weight.base->is_packed();
  }

  const Weight* outputs_first(const MergedWeight& weight) {
    if (!weight.inputs_first) return weight.base;
    return &plan_.views.emplace_back(transposed(*weight.base));
  }

  void set_type(MergedWeight& weight) {
    const std::optional<DType> of_base = float_type(weight.base->dtype);
    const bool is_float = weight.base->is_packed() || of_base.has_value();
    if (!is_float) {
      if (settings_.base_as && skip_reason(*weight.base).empty()) {
        throw Error("weight " + in_quotes(weight.name) + ": is " +
                    std::string(weight.base->format) +
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
                                  .double_quant = settings_.base_double_quant,
                                  .stack = weight.experts != 0 ? Stack::kOwn : Stack::kNone};
    }
    if (settings_.format && stored && weight.members.empty() && is_packed(weight, linear)) {
      const bool gpt_oss = gpt_oss_ && *settings_.format == Format::kMxfp4;
      weight.packed = Conversion{.weight = weight.base,
                                 .action = Action::kQuantize,
                                 .format = *settings_.format,
                                 .block = settings_.block,
                                 .double_quant = settings_.double_quant,
                                 .stack = weight.experts == 0 ? Stack::kNone
                                          : gpt_oss           ? Stack::kGptOss
                                                              : Stack::kOwn};
      set_rounding(weight);
      return;
    }
    weight.dtype = settings_.dtype ? settings_.dtype : of_base;
    const bool same = !weight.base->is_packed() && weight.dtype == of_base;
    if (same && !weight.is_changed() && !weight.base_as) weight.dtype.reset();
  }

  void set_rounding(MergedWeight& weight) {
    if (settings_.rounding == Rounding::kNearest) return;
    if (!weight.low_rank.empty()) weight.rounding = Rounding::kAdapter;
    if (settings_.rounding != Rounding::kCalibrated) return;
    // Rows of a weight with fan_in_fan_out are inputs, feedback runs along columns.
    const bool is_transposed = std::any_of(
        weight.low_rank.begin(), weight.low_rank.end(),
        [](const LowRankChange& change) { return change.transposed && change.experts == 1; });
    if (!is_transposed)
      weight.inputs = settings_.calibration->find(weight.name, weight.shape.back());
    ++(weight.inputs != nullptr ? plan_.calibrated : plan_.not_calibrated);
    if (weight.inputs != nullptr) weight.rounding = Rounding::kCalibrated;
  }

  const json::Value& config_;
  const MergeSettings& settings_;
  ExpertStacks stacks_;
  bool gpt_oss_ = false;
  const WeightedAdapter* adapter_ = nullptr;
  std::map<std::string, MergedWeight> weights_;
  std::map<std::string, const Adapter*> replaced_by_;
  bool made_head_ = false, keeps_tie_ = false, trained_tokens_ = false;
  MergePlan plan_;
};

}  // namespace

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
      throw Error("weight " + in_quotes(weight.name) + ": cannot decode " +
                  std::string(weight.format) + " (" + std::string(weight.quant_method) + ")");
    }
  }
  Planner planner(weights, config, settings);
  for (const WeightedAdapter& adapter : adapters) planner.apply(adapter);
  return planner.finish();
}

}  // namespace monograph
