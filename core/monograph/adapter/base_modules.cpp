#include "monograph/adapter/base_modules.h"

#include <algorithm>
#include <array>

namespace monograph {
namespace {

constexpr std::array<std::string_view, 5> kEmbeddings = {
    "embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight",
    "embed_in.weight"};
constexpr std::array<std::string_view, 3> kHeads = {"lm_head.weight", "embed_out.weight",
                                                    "output.weight"};
constexpr std::string_view kWeight = ".weight";

template <std::size_t N>
bool is_one_of(std::string_view name, const std::array<std::string_view, N>& ends) {
  return std::any_of(ends.begin(), ends.end(), [&](std::string_view end) {
    return name == end || (name.ends_with(end) && name[name.size() - end.size() - 1] == '.');
  });
}

std::string_view from_layers(std::string_view module) {
  const std::size_t at = module.find("layers.");
  return at == std::string_view::npos ? module : module.substr(at);
}

}  // namespace

BaseModules::BaseModules(const std::vector<Weight>& weights, const json::Value& config)
    : config_(config), stacks_(stack_experts(weights, config)) {
  bool several = false, has_head = false;
  for (const Weight& weight : weights) {
    weights_.emplace(weight.name, &weight);
    has_head = has_head || is_one_of(weight.name, kHeads);
    if (!is_one_of(weight.name, kEmbeddings)) continue;
    several = embedding_ != nullptr;
    embedding_ = &weight;
  }
  if (several) embedding_ = nullptr;  // which one would be a guess
  for (const Weight& stack : stacks_.stacks) stacks_by_name_.emplace(stack.name, &stack);
  const json::Value* tie = setting("tie_word_embeddings");
  tied_ =
      (tie != nullptr && tie->as_bool().value_or(false)) || (!has_head && embedding_ != nullptr);
}

const json::Value* BaseModules::setting(std::string_view key) const {
  if (!config_.is(json::Kind::kObject)) return nullptr;
  const json::Value* text = config_.find("text_config");
  const bool inner = text != nullptr && text->is(json::Kind::kObject);
  if (const json::Value* found = inner ? text->find(key) : nullptr) return found;
  return config_.find(key);
}

std::string_view BaseModules::model_type() const {
  const json::Value* type = setting("model_type");
  return type == nullptr ? std::string_view() : type->as_string().value_or("");
}

std::uint64_t BaseModules::number(std::string_view key) const {
  const json::Value* value = setting(key);
  return value == nullptr ? 0 : value->as_unsigned().value_or(0);
}

const Weight* BaseModules::look(const std::string& name) const {
  const auto found = weights_.find(name);
  return found == weights_.end() ? nullptr : found->second;
}

std::optional<BaseMatrix> BaseModules::find(const std::string& module) const {
  std::string name = module + std::string(kWeight);
  const Weight* weight = look(name);
  if (weight == nullptr) {
    if (const std::string router = stored_router(name); !router.empty()) {
      weight = look(router);
      if (weight != nullptr) name = router;
    }
  }
  const bool head = is_one_of(name, kHeads);
  if (weight == nullptr && head) weight = embedding_;
  if (weight == nullptr) return find_expert(module);
  if (weight->shape.size() != 2) return std::nullopt;
  name.resize(name.size() - kWeight.size());
  return BaseMatrix{weight, name, weight->shape,
                    is_one_of(name + std::string(kWeight), kEmbeddings), head};
}

std::optional<BaseMatrix> BaseModules::find_expert(const std::string& module) const {
  const std::optional<ExpertName> expert = parse_expert_name(module + std::string(kWeight));
  if (!expert) return std::nullopt;
  const bool down = expert->projection == "down";
  const Weight* stack = look_stack(expert->module, down ? "down_proj" : "gate_up_proj");
  const bool gated = stack != nullptr && !down;
  if (stack == nullptr && expert->projection == "up") stack = look_stack(expert->module, "up_proj");
  if (stack == nullptr || expert->expert >= stack->shape[0]) return std::nullopt;
  BaseMatrix found{stack, module, {stack->shape[1], stack->shape[2]}};
  if (gated) found.shape[0] /= 2;
  return found;
}

const Weight* BaseModules::look_stack(const std::string& module, std::string_view parameter) const {
  constexpr std::string_view kModule = ".mlp.experts", kGranite = ".block_sparse_moe.experts";
  std::vector<std::string> names = {module + "." + std::string(parameter)};
  if (module.ends_with(kModule)) {
    const std::string layer = module.substr(0, module.size() - kModule.size());
    for (const char* other : {".block_sparse_moe.experts.", ".feed_forward.experts."}) {
      names.push_back(layer + other + std::string(parameter));
    }
  }
  if (module.ends_with(kGranite)) {
    const std::string part = module.substr(0, module.size() - std::string_view("experts").size());
    names.push_back(part + (parameter == "down_proj" ? "output" : "input") + "_linear.weight");
  }
  for (const std::string& name : names) {
    const auto found = stacks_by_name_.find(name);
    if (found != stacks_by_name_.end()) return found->second;
  }
  return nullptr;
}

std::vector<BaseStack> BaseModules::stacks_of(const std::string& module) const {
  std::vector<BaseStack> found;
  for (const char* parameter : {"gate_up_proj", "up_proj", "down_proj"}) {
    const Weight* stack = look_stack(module, parameter);
    if (stack != nullptr) found.push_back({stack, parameter});
  }
  return found;
}

std::string BaseModules::same_tail(std::string_view module) const {
  const std::string_view tail = from_layers(module);
  std::string found;
  for (const auto& [name, weight] : weights_) {
    if (!name.ends_with(kWeight)) continue;
    const std::string_view other = name.substr(0, name.size() - kWeight.size());
    if (other == module || from_layers(other) != tail) continue;
    if (!found.empty()) return {};
    found = other;
  }
  return found;
}

}  // namespace monograph
