#include "monograph/weights/experts.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "monograph/text/utf8.h"
#include "monograph/weights/model_settings.h"

namespace monograph {
namespace {

using safetensors::shape_text;

constexpr std::string_view kWeight = ".weight", kExperts = ".experts.";

struct Projection {
  std::string_view stored, meant;
};
constexpr std::array kProjections = {Projection{"gate_proj", "gate"}, Projection{"up_proj", "up"},
                                     Projection{"down_proj", "down"}, Projection{"w1", "gate"},
                                     Projection{"w3", "up"},          Projection{"w2", "down"}};

// The end of a stack's name, whether its inputs are the hidden states, and the parameter it is.
struct StackName {
  std::string_view end;
  bool from_hidden;
  std::string_view parameter;
};
constexpr std::array kStacks = {
    StackName{".experts.gate_up_proj", true, "gate_up_proj"},
    StackName{".experts.up_proj", true, "up_proj"},
    StackName{".experts.down_proj", false, "down_proj"},
    StackName{".block_sparse_moe.input_linear.weight", true, "gate_up_proj"},
    StackName{".block_sparse_moe.output_linear.weight", false, "down_proj"}};

// What transformers and files call a module of experts, and Granite the parameters in it.
struct OtherName {
  std::string_view known, stored;
};
constexpr std::array kModules = {OtherName{".mlp.experts", ".block_sparse_moe.experts"},
                                 OtherName{".mlp.experts", ".feed_forward.experts"}};
constexpr std::array kGranite = {
    OtherName{".block_sparse_moe.experts.gate_up_proj", ".block_sparse_moe.input_linear.weight"},
    OtherName{".block_sparse_moe.experts.down_proj", ".block_sparse_moe.output_linear.weight"}};

// `name` with another end; empty if it has not this one.
std::string with_end(std::string_view name, std::string_view end, std::string_view other) {
  if (!name.ends_with(end)) return {};
  return std::string(name.substr(0, name.size() - end.size())) + std::string(other);
}

const StackName* stack_name(std::string_view name) {
  const auto* found = std::find_if(kStacks.begin(), kStacks.end(), [&](const StackName& stack) {
    return name.ends_with(stack.end);
  });
  return found == kStacks.end() ? nullptr : found;
}

bool alike(const Weight& a, const Weight& b) {
  return a.shape == b.shape && a.dtype == b.dtype && a.format == b.format &&
         a.quant_method == b.quant_method && a.block == b.block && a.double_quant == b.double_quant;
}

// The matrices of one module: by projection, then by expert.
using Matrices = std::map<std::string_view, std::map<std::uint64_t, const Weight*>>;

// Experts 0 to E - 1 of every projection, all of one kind; else why not.
std::string why_not(const Matrices& matrices) {
  if (!matrices.contains("up") || !matrices.contains("down")) {
    return "wanted gate, up and down of each expert, or up and down";
  }
  const std::size_t experts = matrices.at("down").size();
  for (const auto& [projection, of] : matrices) {
    const Weight& first = *of.begin()->second;
    if (of.size() != experts || of.rbegin()->first != experts - 1) {
      return std::string(projection) + " has " + std::to_string(of.size()) +
             " experts up to number " + std::to_string(of.rbegin()->first) + ", down has " +
             std::to_string(experts);
    }
    for (const auto& [expert, weight] : of) {
      if (weight->shape.size() != 2 || !alike(*weight, first)) {
        return text::in_quotes(weight->name) + " is " + std::string(weight->format) + " " +
               shape_text(weight->shape) + ", " + text::in_quotes(first.name) + " is " +
               std::string(first.format) + " " + shape_text(first.shape);
      }
    }
  }
  const Weight& up = *matrices.at("up").begin()->second;
  if (matrices.contains("gate") && !alike(*matrices.at("gate").begin()->second, up)) {
    return "gate and up differ in shape or format";
  }
  return {};
}

Weight stack_of(const std::string& module, const Matrices& matrices, bool down, bool in_turns) {
  std::vector<Weight> sources;
  const bool gated = !down && matrices.contains("gate");
  for (const auto& [expert, weight] : matrices.at(down ? "down" : "up")) {
    if (gated) sources.push_back(*matrices.at("gate").at(expert));
    sources.push_back(*weight);
  }
  const std::vector<std::uint64_t>& one = sources.front().shape;
  const std::uint64_t experts = matrices.at("down").size();
  const std::string name = module + (down ? ".down_proj" : gated ? ".gate_up_proj" : ".up_proj");
  const std::vector<std::uint64_t> shape = {experts, gated ? 2 * one[0] : one[0], one[1]};
  return gated && in_turns ? stacked_in_turns(name, shape, std::move(sources))
                           : stacked(name, shape, std::move(sources));
}

bool is_of_gguf(const Weight& weight) { return weight.quant_method == "GGUF"; }

}  // namespace

std::optional<ExpertName> parse_expert_name(std::string_view weight) {
  const std::size_t at = weight.rfind(kExperts);
  if (at == std::string_view::npos) return std::nullopt;
  std::string_view rest = weight.substr(at + kExperts.size());
  if (!rest.ends_with(kWeight)) return std::nullopt;  // "m.experts.weight" is of no single expert
  rest.remove_suffix(kWeight.size());
  ExpertName name;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), name.expert);
  if (error != std::errc() || end == rest.data() + rest.size() || *end != '.') return std::nullopt;
  const std::string_view projection = rest.substr(static_cast<std::size_t>(end - rest.data()) + 1);
  for (const Projection& known : kProjections) {
    if (projection != known.stored) continue;
    name.module = std::string(weight.substr(0, at + kExperts.size() - 1));
    name.projection = known.meant;
    return name;
  }
  return std::nullopt;
}

bool is_expert_stack(const Weight& weight) {
  return weight.shape.size() == 3 && stack_name(weight.name) != nullptr;
}

std::string_view stack_parameter(std::string_view name) {
  const StackName* found = stack_name(name);
  return found == nullptr ? std::string_view() : found->parameter;
}

std::string stored_router(std::string_view name) {
  constexpr std::array<std::array<std::string_view, 2>, 2> kRouters = {
      {{".mlp.gate.weight", ".block_sparse_moe.gate.weight"},
       {".block_sparse_moe.router.weight", ".block_sparse_moe.router.layer.weight"}}};
  for (const auto& [known, stored] : kRouters) {
    if (!name.ends_with(known)) continue;
    return std::string(name.substr(0, name.size() - known.size())) + std::string(stored);
  }
  return {};
}

std::optional<StackOrder> order_of(const Weight& stack, const json::Value& config) {
  using enum StackOrder;
  const std::uint64_t hidden = number_setting(config, "hidden_size");
  const StackName* name = stack_name(stack.name);
  if (hidden == 0 || name == nullptr || stack.shape.size() != 3) return std::nullopt;
  const bool first = stack.shape[1] == hidden, last = stack.shape[2] == hidden;
  if (first != last) return last == name->from_hidden ? kOutputsFirst : kInputsFirst;
  if (!first) return std::nullopt;
  return stack.is_packed() || !stores_experts_transposed(config) ? kOutputsFirst : kInputsFirst;
}

std::vector<std::string> member_names(const Weight& stack) {
  if (!stack.composed) return {stack.name};
  std::vector<std::string> names;
  for (const Weight& source : stack.composed->sources) names.push_back(source.name);
  return names;
}

const Weight* ExpertStacks::find(const std::string& module, std::string_view parameter) const {
  const std::string known = module + "." + std::string(parameter);
  std::vector<std::string> names = {known};
  for (const OtherName& other : kModules) {
    const std::string stored = with_end(module, other.known, other.stored);
    if (!stored.empty()) names.push_back(stored + "." + std::string(parameter));
  }
  for (const OtherName& other : kGranite) {
    names.push_back(with_end(known, other.known, other.stored));
  }
  for (const std::string& name : names) {
    const auto found = std::lower_bound(
        stacks.begin(), stacks.end(), name,
        [](const Weight& stack, const std::string& wanted) { return stack.name < wanted; });
    if (found != stacks.end() && found->name == name) return &*found;
  }
  return nullptr;
}

std::vector<std::string> parameter_names(std::string_view weight) {
  std::vector<std::string> stored;
  if (const std::optional<ExpertName> expert = parse_expert_name(weight)) {
    const bool down = expert->projection == "down";
    stored.push_back(expert->module + (down ? ".down_proj" : ".gate_up_proj"));
    if (expert->projection == "up") stored.push_back(expert->module + ".up_proj");
  } else if (stack_name(weight) != nullptr) {
    stored.emplace_back(weight);
  }
  std::vector<std::string> names;
  for (const std::string& name : stored) {
    std::string known;
    for (const OtherName& other : kGranite) {
      if (known.empty()) known = with_end(name, other.stored, other.known);
    }
    names.push_back(known.empty() ? name : known);
    const std::size_t dot = names.back().rfind('.');
    const std::string module = names.back().substr(0, dot), parameter = names.back().substr(dot);
    for (const OtherName& other : kModules) {
      const std::string renamed = with_end(module, other.stored, other.known);
      if (!renamed.empty()) names.push_back(renamed + parameter);
    }
  }
  return names;
}

ExpertStacks stack_experts(const std::vector<Weight>& weights, const json::Value& config) {
  ExpertStacks result;
  std::map<std::string, Matrices> modules;
  std::map<std::string, std::vector<const Weight*>> members;
  for (const Weight& weight : weights) {
    if (is_expert_stack(weight)) {
      const auto order = order_of(weight, config);
      if (!order) {
        result.refused[weight.name] = "has the shape " + shape_text(weight.shape) +
                                      ", and no dimension is hidden_size of config.json";
        continue;
      }
      result.members.insert(&weight);
      result.stacks.push_back(*order == StackOrder::kOutputsFirst ? weight : transposed(weight));
    } else if (const auto name = parse_expert_name(weight.name)) {
      if (!modules[name->module][name->projection].emplace(name->expert, &weight).second) {
        result.refused[name->module] = text::in_quotes(weight.name) + " is there twice";
      }
      members[name->module].push_back(&weight);
    } else if (const std::size_t at = weight.name.rfind(kExperts); at != std::string::npos) {
      const char next = weight.name[std::min(at + kExperts.size(), weight.name.size() - 1)];
      const bool of_one = next >= '0' && next <= '9';
      const bool matrix = weight.shape.size() >= 2 && !weight.name.ends_with("_bias");
      if (is_of_gguf(weight) && weight.name.ends_with(".bias")) continue;
      if (of_one || matrix) {
        const std::string where =
            of_one ? weight.name.substr(0, at + kExperts.size() - 1) : weight.name;
        result.refused.try_emplace(
            where, text::in_quotes(weight.name) +
                       " is none of gate_proj, up_proj, down_proj, w1, w2, w3 and gate_up_proj");
      }
    }
  }
  const ExpertLayout* layout = find_expert_layout(config);
  const bool interleaved = layout != nullptr && layout->gate_up == GateUp::kInterleaved;
  for (const auto& [module, matrices] : modules) {
    if (result.refused.contains(module)) continue;
    // A GGUF file has gate and up apart, as no folder of such a model has.
    if (interleaved && !is_of_gguf(*members[module].front())) {
      result.refused[module] = "experts are stored one by one, and model_type " +
                               text::in_quotes(layout->model_type) + " has them in a stack";
      continue;
    }
    if (const std::string why = why_not(matrices); !why.empty()) {
      result.refused[module] = why;
      continue;
    }
    for (const bool down : {false, true}) {
      result.stacks.push_back(stack_of(module, matrices, down, interleaved));
    }
    result.members.insert(members[module].begin(), members[module].end());
  }
  std::sort(result.stacks.begin(), result.stacks.end(),
            [](const Weight& a, const Weight& b) { return a.name < b.name; });
  return result;
}

}  // namespace monograph
