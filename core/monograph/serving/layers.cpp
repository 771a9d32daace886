#include "monograph/serving/layers.h"

#include <algorithm>
#include <array>

namespace monograph {
namespace {

struct Sibling {
  std::string_view leaf, required;
};
// q without k is filled with zeros by SGLang, gate without up too.
constexpr std::array kSglangParts = {Sibling{"q_proj", "v_proj"}, Sibling{"k_proj", "q_proj"},
                                     Sibling{"k_proj", "v_proj"}, Sibling{"v_proj", "q_proj"},
                                     Sibling{"up_proj", "gate_proj"}};
constexpr std::array kExpertLeaves = {
    std::array<std::string_view, 3>{"gate_proj", "up_proj", "down_proj"},
    std::array<std::string_view, 3>{"w1", "w3", "w2"}};
constexpr std::array<std::string_view, 6> kStackedInVllm = {"gpt_oss",      "interns1_pro_text",
                                                            "qwen3_5_moe",  "qwen3_5_moe_text",
                                                            "qwen3_vl_moe", "qwen3_vl_moe_text"};

}  // namespace

std::vector<std::string> required_with(const BaseModules& base, Server server,
                                       const std::string& module) {
  std::vector<std::string> required;
  const std::size_t dot = module.rfind('.');
  if (dot == std::string::npos) return required;
  const std::string parent = module.substr(0, dot + 1);
  const std::string_view leaf = std::string_view(module).substr(dot + 1);
  const auto add = [&](const std::string& other) {
    if (other != module && base.find(other)) required.push_back(other);
  };
  if (server == Server::kSglang) {
    for (const Sibling& row : kSglangParts) {
      if (leaf == row.leaf) add(parent + std::string(row.required));
    }
  }
  const std::optional<ExpertName> expert = parse_expert_name(module + ".weight");
  if (server != Server::kVllm || !expert) return required;
  for (const auto& leaves : kExpertLeaves) {
    if (std::find(leaves.begin(), leaves.end(), leaf) == leaves.end()) continue;
    for (const std::string_view other : leaves) add(parent + std::string(other));
  }
  const std::vector<BaseStack> stacks = base.stacks_of(expert->module);
  if (!stacks.empty() && stacks.front().stack->shape[0] != 0) {
    const std::uint64_t next = (expert->expert + 1) % stacks.front().stack->shape[0];
    add(expert->module + "." + std::to_string(next) + "." + std::string(leaf));
  }
  return required;
}

std::vector<ExpertPart> parts_of(const BaseModules& base, const PlacedFactors& placed) {
  const std::uint64_t rows = placed.outputs();
  if (placed.parameter == "down_proj") return {{"down", 0, rows}};
  if (placed.parameter == "up_proj") return {{"up", 0, rows}};
  const ExpertLayout* layout = base.expert_layout();
  if (layout != nullptr && layout->gate_up == GateUp::kInterleaved) {
    return {{"gate", 0, rows / 2, 2}, {"up", 1, rows / 2, 2}};
  }
  return {{"gate", 0, rows / 2}, {"up", rows / 2, rows / 2}};
}

std::optional<std::string> single_expert(const BaseModules& base, const PlacedFactors& placed,
                                         std::uint64_t expert, const ExpertPart& part,
                                         Server server) {
  const ExpertLayout* layout = base.expert_layout();
  const bool in_turns = layout != nullptr && layout->gate_up == GateUp::kInterleaved;
  const bool modules = layout == nullptr || layout->modules != ExpertModules::kNone;
  if (server != Server::kLlamaCpp && (!modules || in_turns)) return std::nullopt;
  const Weight& stack = *placed.matrix.weight;
  if (!modules || in_turns) {
    // llama.cpp has gate and up apart in every model: names that its tensors follow from.
    const std::size_t dot = stack.name.rfind('.');
    if (dot == std::string::npos) return std::nullopt;
    return stack.name.substr(0, dot + 1) + std::to_string(expert) + "." +
           std::string(part.projection) + "_proj";
  }
  if (!stack.composed || stack.composed->transposed) {
    constexpr std::string_view kEnd = ".experts.";
    const std::size_t at = stack.name.rfind(kEnd);
    if (layout == nullptr || at == std::string::npos) return std::nullopt;
    return stack.name.substr(0, at + kEnd.size()) + std::to_string(expert) + "." +
           std::string(expert_leaf(layout->modules, part.projection));
  }
  const std::vector<std::string> members = member_names(stack);
  const std::size_t each = members.size() / placed.experts;
  for (std::size_t i = expert * each; i < (expert + 1) * each; ++i) {
    const std::optional<ExpertName> name = parse_expert_name(members[i]);
    if (name && name->projection == part.projection) {
      return members[i].substr(0, members[i].rfind(".weight"));
    }
  }
  return std::nullopt;
}

bool wants_mixed_format(const BaseModules& base) {
  return std::find(kStackedInVllm.begin(), kStackedInVllm.end(), base.model_type()) !=
         kStackedInVllm.end();
}

}  // namespace monograph
