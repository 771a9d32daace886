// Experts of a mixture in every way that folders store them, seen in one: a weight [experts,
// outputs, inputs] by the name of the parameter that transformers has.
//   one by one     X.experts.N.gate_proj|up_proj|down_proj.weight, or w1|w3|w2
//   stacked        X.experts.gate_up_proj, X.experts.down_proj; X.input_linear.weight of Granite
//   transposed     the same as [experts, inputs, outputs], by the model: gpt-oss, Llama 4
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/weights/composed_weight.h"
#include "monograph/weights/expert_layout.h"

namespace monograph {

// "X.experts.3.gate_proj.weight".
struct ExpertName {
  std::string module;           // "X.experts"
  std::uint64_t expert = 0;     // 3
  std::string_view projection;  // "gate", "up" or "down"
};
std::optional<ExpertName> parse_expert_name(std::string_view weight);

// Whether the weight holds the matrices of several experts, by its name and three dimensions.
bool is_expert_stack(const Weight& weight);

// The parameter that transformers has for a stack of this name: "gate_up_proj" for Granite's
// "X.block_sparse_moe.input_linear.weight"; empty if it is none.
std::string_view stack_parameter(std::string_view name);

// What files of Mixtral and Granite call the router that transformers has as `name`; empty for any
// other weight.
std::string stored_router(std::string_view name);

// How a stack lies: told by hidden_size of `config` where the shape decides, else by the model for
// a plain weight, while packed values have outputs for rows. Nothing if no dimension is
// hidden_size.
enum class StackOrder : std::uint8_t { kOutputsFirst, kInputsFirst };
std::optional<StackOrder> order_of(const Weight& stack, const json::Value& config);

struct ExpertStacks {
  std::vector<Weight> stacks;                  // [experts, outputs, inputs], sorted by name
  std::set<const Weight*> members;             // of `weights`: those that are a part of one
  std::map<std::string, std::string> refused;  // module or weight -> why it is in no stack

  // The stack that transformers has as `parameter` of `module`, whatever the files call it; nullptr
  // if there is none.
  const Weight* find(const std::string& module, std::string_view parameter) const;
};

// The parameters of a module of experts, in the order in which the classes have them.
inline constexpr std::array<std::string_view, 3> kExpertParameters = {"gate_up_proj", "up_proj",
                                                                      "down_proj"};

// What transformers may call the parameter that a stored weight, a stack or one expert's matrix, is
// or belongs to, the likeliest first; empty for any other weight.
std::vector<std::string> parameter_names(std::string_view weight);

// The names of the weights that a stack of stack_experts consists of, in order.
std::vector<std::string> member_names(const Weight& stack);

// Every stack that the weights make. Gate and up of an expert become gate_up_proj, gate first;
// refused where the model is known to have them otherwise.
ExpertStacks stack_experts(const std::vector<Weight>& weights, const json::Value& config);

}  // namespace monograph
