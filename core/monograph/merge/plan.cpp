#include "monograph/merge/plan.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "monograph/base/error.h"
#include "monograph/convert/quantization_config.h"
#include "monograph/convert/why_kept.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

using safetensors::LocatedTensor;
using text::in_quotes;

constexpr std::array<std::string_view, 5> kEmbeddings = {
    "embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight",
    "embed_in.weight"};
constexpr std::array<std::string_view, 3> kHeads = {"lm_head.weight", "embed_out.weight",
                                                    "output.weight"};

template <std::size_t N>
bool is_one_of(std::string_view name, const std::array<std::string_view, N>& ends) {
  return std::any_of(ends.begin(), ends.end(), [&](std::string_view end) {
    return name == end || (name.ends_with(end) && name[name.size() - end.size() - 1] == '.');
  });
}

std::string shape_text(const std::vector<std::uint64_t>& shape) {
  std::string text = "[";
  for (const std::uint64_t size : shape) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  }
  return text + "]";
}

bool config_says_tied(const json::Value& config) {
  const auto says = [](const json::Value* value) {
    const json::Value* tied = value == nullptr ? nullptr : value->find("tie_word_embeddings");
    return tied != nullptr && tied->as_bool().value_or(false);
  };
  return says(&config) || says(config.find("text_config"));
}

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
      : config_(config), settings_(settings) {
    for (const Weight& weight : weights) add_base(weight.name, weight);
  }

  void apply(const WeightedAdapter& adapter) {
    adapter_ = &adapter;
    keeps_tie_ = keeps_tie_ || adapter.adapter->config().ensure_weight_tying;
    for (const auto& [tensor, with] : adapter.adapter->replacements()) replace(tensor, with);
    for (const auto& [module, lora] : adapter.adapter->low_rank()) add_lora(module, lora);
    for (const auto& [tensor, rows] : adapter.adapter->token_rows()) set_tokens(tensor, rows);
  }

  MergePlan finish() {
    untie_if_needed();
    for (auto& [name, weight] : weights_) {
      set_type(weight);
      plan_.weights.push_back(std::move(weight));
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

  // The weight that an adapter names; a head that is not stored is made from the embedding.
  MergedWeight& find(const std::string& name) {
    const auto found = weights_.find(name);
    if (found != weights_.end()) return found->second;
    const MergedWeight* embedding = is_one_of(name, kHeads) ? find_embedding() : nullptr;
    if (embedding == nullptr) fail(name, "the base has no such weight");
    made_head_ = true;
    return add_base(name, *embedding->base);
  }

  const MergedWeight* find_embedding() const {
    const MergedWeight* found = nullptr;
    for (const auto& [name, weight] : weights_) {
      if (!is_one_of(name, kEmbeddings)) continue;
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
    if (with.entry->shape != weight.shape) {
      fail(name, "the adapter replaces it by shape " + shape_text(with.entry->shape) +
                     ", the base has " + shape_text(weight.shape));
    }
    weight.replacement = &with;
    replaced_by_[name] = adapter_->adapter;
  }

  void add_lora(const std::string& module, const LowRank& lora) {
    MergedWeight& weight = find(module + ".weight");
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
    weight.low_rank.push_back({&lora, factor, transposed});
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
    for (const std::uint64_t token : rows.tokens) {
      if (token >= weight.shape[0]) {
        fail(name, "token " + std::to_string(token) + " is not one of its " +
                       std::to_string(weight.shape[0]) + " rows");
      }
    }
    weight.tokens = &rows;
    keeps_tie_ = trained_tokens_ = true;
  }

  void untie_if_needed() {
    const MergedWeight* embedding = find_embedding();
    MergedWeight* head = nullptr;
    for (auto& [name, weight] : weights_) {
      if (is_one_of(name, kHeads)) head = &weight;
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

  void set_type(MergedWeight& weight) const {
    const std::optional<DType> of_base = float_type(weight.base->dtype);
    const bool is_float = weight.base->is_packed() || of_base.has_value();
    if (!is_float) {
      if (settings_.base_as && why_kept(*weight.base).empty()) {
        throw Error("weight " + in_quotes(weight.name) + ": is " +
                    std::string(weight.base->format) +
                    ", which is never loaded in a packed format; wanted fp32, bf16 or fp16");
      }
      return;
    }
    const bool linear = weight.base->is_packed() || why_kept(*weight.base).empty();
    if (settings_.base_as && linear && weight.name == weight.base->name) {
      weight.base_as = Conversion{.weight = weight.base,
                                  .action = Action::kQuantize,
                                  .format = *settings_.base_as,
                                  .block = settings_.base_block,
                                  .double_quant = settings_.base_double_quant};
    }
    if (settings_.format && linear && weight.name == weight.base->name) {
      weight.packed = Conversion{.weight = weight.base,
                                 .action = Action::kQuantize,
                                 .format = *settings_.format,
                                 .block = settings_.block,
                                 .double_quant = settings_.double_quant};
      return;
    }
    weight.dtype = settings_.dtype ? settings_.dtype : of_base;
    const bool same = !weight.base->is_packed() && weight.dtype == of_base;
    if (same && !weight.is_changed() && !weight.base_as) weight.dtype.reset();
  }

  const json::Value& config_;
  const MergeSettings& settings_;
  const WeightedAdapter* adapter_ = nullptr;
  std::map<std::string, MergedWeight> weights_;
  std::map<std::string, const Adapter*> replaced_by_;
  bool made_head_ = false, keeps_tie_ = false, trained_tokens_ = false;
  MergePlan plan_;
};

std::string_view torch_name(DType dtype) { return name_of(dtype); }

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
    specs.push_back({weight.name, dtype, weight.shape});
  }
  return specs;
}

MergePlan plan_merge(const std::vector<Weight>& weights, const json::Value& config,
                     std::span<const WeightedAdapter> adapters, const MergeSettings& settings) {
  for (const Weight& weight : weights) {
    if (weight.is_packed() && !weight.is_readable()) {
      throw Error("weight " + in_quotes(weight.name) + ": cannot decode " +
                  std::string(weight.format) + " (" + std::string(weight.spelling) + ")");
    }
  }
  Planner planner(weights, config, settings);
  for (const WeightedAdapter& adapter : adapters) planner.apply(adapter);
  return planner.finish();
}

json::Value merged_config(json::Value config, const MergePlan& plan,
                          const MergeSettings& settings) {
  const auto change = [&](json::Value& part) {
    part.erase("quantization_config");
    for (const char* key : {"dtype", "torch_dtype"}) {
      const bool known = part.find(key) != nullptr && part.find(key)->is(json::Kind::kString);
      if (settings.dtype && known) part.set(key, json::Value::string(torch_name(*settings.dtype)));
    }
    if (plan.unties_head) part.set("tie_word_embeddings", json::Value::boolean(false));
  };
  change(config);
  if (settings.format) {
    std::vector<Conversion> conversions;
    for (const MergedWeight& weight : plan.weights) {
      conversions.push_back(weight.packed ? *weight.packed : Conversion{.weight = weight.base});
    }
    config.set("quantization_config", quantization_config(config, conversions));
  }
  if (const json::Value* text = config.find("text_config")) {
    json::Value inner = *text;
    change(inner);
    config.set("text_config", std::move(inner));
  }
  return config;
}

}  // namespace monograph
