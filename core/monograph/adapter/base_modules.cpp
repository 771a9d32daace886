#include "monograph/adapter/base_modules.h"

#include "monograph/weights/vocabulary.h"

namespace monograph {
namespace {

constexpr std::string_view kWeight = ".weight";

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
    has_head = has_head || is_head(weight.name);
    if (!is_input_embedding(weight.name)) continue;
    several = embedding_ != nullptr;
    embedding_ = &weight;
  }
  if (several) embedding_ = nullptr;  // which one would be a guess
  layout_ = find_expert_layout(config);
  tied_ = config_says_tied(config) || (!has_head && embedding_ != nullptr);
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
  const bool head = is_head(name);
  if (weight == nullptr && head) weight = embedding_;
  if (weight == nullptr) return find_expert(module);
  if (weight->shape.size() != 2) return std::nullopt;
  name.resize(name.size() - kWeight.size());
  return BaseMatrix{weight, name, weight->shape, is_input_embedding(name + std::string(kWeight)),
                    head};
}

std::optional<BaseMatrix> BaseModules::find_expert(const std::string& module) const {
  const std::optional<ExpertName> expert = parse_expert_name(module + std::string(kWeight));
  if (!expert || !has_single_experts()) return std::nullopt;
  const bool down = expert->projection == "down";
  const Weight* stack = stacks_.find(expert->module, down ? "down_proj" : "gate_up_proj");
  const bool gated = stack != nullptr && !down;
  if (stack == nullptr && expert->projection == "up")
    stack = stacks_.find(expert->module, "up_proj");
  if (stack == nullptr || expert->expert >= stack->shape[0]) return std::nullopt;
  BaseMatrix found{stack, module, {stack->shape[1], stack->shape[2]}};
  if (gated) found.shape[0] /= 2;
  return found;
}

std::vector<BaseStack> BaseModules::stacks_of(const std::string& module) const {
  std::vector<BaseStack> found;
  for (const std::string_view parameter : kExpertParameters) {
    const Weight* stack = stacks_.find(module, parameter);
    if (stack != nullptr) found.push_back({stack, std::string(parameter)});
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
