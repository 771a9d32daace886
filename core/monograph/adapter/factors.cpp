#include "monograph/adapter/factors.h"

#include <algorithm>

#include "monograph/adapter/factor_order.h"
#include "monograph/base/float_types.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

using safetensors::LocatedTensor;
using text::in_quotes;

constexpr std::string_view kWrapped = ".base_layer";

bool is_float(const LocatedTensor& tensor) { return float_type(tensor.entry->dtype).has_value(); }

class Placer {
 public:
  Placer(const AdapterTensors& tensors, const BaseModules& base, const AdapterConfig* config)
      : tensors_(tensors), base_(base), config_(config) {}

  Placement place() {
    std::map<std::string, std::vector<const Factors*>> of_experts;  // outermost first
    for (const auto& [module, factors] : tensors_.factors) {
      if (!is_sound(factors)) continue;
      std::string inner = module;
      std::size_t depth = 0;
      for (; inner.ends_with(kWrapped); ++depth) inner.resize(inner.size() - kWrapped.size());
      if (!base_.find(inner) && !base_.stacks_of(inner).empty()) {
        std::vector<const Factors*>& list = of_experts[inner];
        list.resize(std::max(list.size(), depth + 1));
        list[depth] = &factors;
      } else {
        place_matrix(factors);
      }
    }
    for (const auto& [module, list] : of_experts) place_experts(module, list);
    return std::move(result_);
  }

 private:
  void problem(std::string_view rule, const std::string& key, const std::string& what) {
    result_.problems.push_back({rule, key, what, false});
  }

  bool is_sound(const Factors& factors) {
    if (factors.a == nullptr || factors.b == nullptr) {
      const KeyedTensor& there = factors.a == nullptr ? *factors.b : *factors.a;
      problem("pair", there.name(),
              std::string("its module has no lora_") + (factors.a == nullptr ? "A" : "B"));
      return false;
    }
    for (const KeyedTensor* one : {factors.a, factors.b}) {
      if (!is_float(one->tensor)) {
        problem(
            "dtype", one->name(),
            "is " + std::string(name_of(one->tensor.entry->dtype)) + ", wanted F32, BF16 or F16");
        return false;
      }
    }
    const auto &a = factors.a->tensor.entry->shape, &b = factors.b->tensor.entry->shape;
    if (a.size() != 2 || b.size() != 2) {
      const KeyedTensor& odd = a.size() != 2 ? *factors.a : *factors.b;
      problem("shape", odd.name(),
              "has shape " + shape_in_brackets(odd.tensor.entry->shape) + ", wanted a matrix");
      return false;
    }
    if (a[0] != b[1] || a[0] == 0) {
      problem("rank", factors.a->name(),
              "has shape " + shape_in_brackets(a) + " and its B " + shape_in_brackets(b) +
                  ", wanted one rank of at least 1");
      return false;
    }
    return true;
  }

  void place_matrix(const Factors& factors) {
    std::optional<BaseMatrix> matrix = base_.find(factors.module);
    if (!matrix) return not_there(factors);
    const auto &a = factors.a->tensor.entry->shape, &b = factors.b->tensor.entry->shape;
    const bool inputs_first = factors.embedding || (config_ != nullptr && config_->fan_in_fan_out);
    std::vector<std::uint64_t> wanted = matrix->shape;
    if (inputs_first) std::swap(wanted[0], wanted[1]);
    if (a[1] != wanted[1] || b[0] != wanted[0]) {
      const bool transposed = a[1] == wanted[0] && b[0] == wanted[1];
      const bool expert = parse_expert_name(factors.module + ".weight").has_value();
      return problem(transposed && expert ? "experts-transposed" : "shape",
                     a[1] != wanted[1] ? factors.a->name() : factors.b->name(),
                     "B * A is " + shape_in_brackets({b[0], a[1]}) + ", the base has " +
                         shape_in_brackets(wanted) +
                         (transposed ? ": inputs and outputs are exchanged" : ""));
    }
    if (!has_elements(factors, wanted)) return;
    matrix->shape = wanted;
    PlacedFactors placed;
    placed.factors = &factors;
    placed.name = factors.module;
    placed.matrix = *matrix;
    placed.rank = a[0];
    result_.placed.push_back(std::move(placed));
  }

  bool has_elements(const Factors& factors, const std::vector<std::uint64_t>& shape) {
    if (std::find(shape.begin(), shape.end(), 0u) == shape.end()) return true;
    problem("shape", factors.a->name(),
            "the base has shape " + shape_in_brackets(shape) + " there, wanted no dimension of 0");
    return false;
  }

  void not_there(const Factors& factors) {
    const std::string other = base_.same_tail(factors.module);
    if (!other.empty()) {
      return problem(
          "prefix", factors.a->name(),
          "the base has no module " + in_quotes(factors.module) + ", but " + in_quotes(other));
    }
    problem("base", factors.a->name(),
            "the base has no module " + in_quotes(factors.module) + " that LoRA can act on");
  }

  void place_experts(const std::string& module, const std::vector<const Factors*>& list) {
    std::vector<BaseStack> stacks = base_.stacks_of(module);
    if (config_ != nullptr && !config_->target_parameters.empty()) {
      std::erase_if(stacks, [&](const BaseStack& stack) {
        return !config_->targets(module + "." + stack.parameter);
      });
    }
    const auto missing = std::find(list.begin(), list.end(), nullptr);
    const Factors& first = **std::find_if(list.begin(), list.end(), [](auto* f) { return f; });
    if (stacks.size() != list.size() || missing != list.end()) {
      return problem("base", first.a->name(),
                     "the adapter has LoRA for " + std::to_string(list.size()) +
                         " parameters of the experts, target_parameters and the base give " +
                         std::to_string(stacks.size()));
    }
    std::vector<FactorShape> shapes;
    for (std::size_t i = 0; i < stacks.size(); ++i) {
      const Factors& factors = *list[list.size() - 1 - i];
      shapes.push_back({factors.a->tensor.entry->shape[1], factors.b->tensor.entry->shape[0],
                        &stacks[i].stack->shape});
    }
    const std::vector<FactorOrder> orders = factor_orders(shapes);
    for (std::size_t i = 0; i < stacks.size(); ++i) {
      place_stack(module, stacks[i], *list[list.size() - 1 - i], orders[i]);
    }
  }

  void place_stack(const std::string& module, const BaseStack& stack, const Factors& factors,
                   FactorOrder order) {
    const auto &a = factors.a->tensor.entry->shape, &b = factors.b->tensor.entry->shape;
    const std::uint64_t experts = stack.stack->shape[0];
    if (order == FactorOrder::kNeither) {
      return problem("shape", factors.a->name(),
                     "A has " + std::to_string(a[1]) + " inputs and B " + std::to_string(b[0]) +
                         " outputs, the experts are " + shape_in_brackets(stack.stack->shape));
    }
    if (!has_elements(factors, stack.stack->shape)) return;
    if (a[0] % experts != 0) {
      return problem("rank", factors.a->name(),
                     "has shape " + shape_in_brackets(a) + ", wanted a multiple of " +
                         std::to_string(experts) + " experts");
    }
    if (order == FactorOrder::kEither && config_ != nullptr &&
        !config_->keeps_order_of_parameters()) {
      return problem("experts-transposed", factors.a->name(),
                     "its matrices are square and the adapter was written by PEFT " +
                         in_quotes(config_->peft_version) +
                         ", so that inputs and outputs cannot be told apart; wanted 0.20 or newer");
    }
    PlacedFactors placed;
    placed.factors = &factors;
    placed.name = module + "." + stack.parameter;
    placed.matrix = {
        stack.stack, stack.stack->name, {stack.stack->shape[1], stack.stack->shape[2]}};
    placed.rank = a[0] / experts;
    placed.experts = experts;
    placed.module = module;
    placed.parameter = stack.parameter;
    placed.swapped = order == FactorOrder::kSwapped;
    result_.placed.push_back(std::move(placed));
  }

  const AdapterTensors& tensors_;
  const BaseModules& base_;
  const AdapterConfig* config_;
  Placement result_;
};

// Elements begin, begin + step ... of a tensor, `count` of them.
void append_floats(const LocatedTensor& tensor, std::uint64_t begin, std::uint64_t count,
                   std::uint64_t step, std::vector<float>& out) {
  const std::uint8_t* bytes = tensor.bytes().data();
  with_type(*float_type(tensor.entry->dtype), [&]<class T>() {
    for (std::uint64_t i = 0; i < count; ++i) {
      T value;
      std::memcpy(&value, bytes + (begin + i * step) * sizeof(T), sizeof(T));
      out.push_back(to_float(value));
    }
  });
}

// Rows [expert * rank, ...) of a factor whose experts lie one behind the other.
std::vector<float> expert_rows(const LocatedTensor& tensor, std::uint64_t rank,
                               std::uint64_t expert) {
  const std::uint64_t size = rank * tensor.entry->shape[1];
  std::vector<float> out;
  out.reserve(size);
  append_floats(tensor, expert * size, size, 1, out);
  return out;
}

// Columns expert, expert + experts ... of a factor whose ranks lie one behind the other.
std::vector<float> expert_columns(const LocatedTensor& tensor, std::uint64_t rank,
                                  std::uint64_t experts, std::uint64_t expert) {
  std::vector<float> out;
  out.reserve(tensor.entry->shape[0] * rank);
  for (std::uint64_t row = 0; row < tensor.entry->shape[0]; ++row) {
    append_floats(tensor, row * rank * experts + expert, rank, experts, out);
  }
  return out;
}

std::vector<float> transposed(const std::vector<float>& matrix, std::uint64_t rows) {
  const std::uint64_t cols = rows == 0 ? 0 : matrix.size() / rows;
  std::vector<float> out(matrix.size());
  for (std::uint64_t i = 0; i < rows; ++i) {
    for (std::uint64_t j = 0; j < cols; ++j) out[j * rows + i] = matrix[i * cols + j];
  }
  return out;
}

}  // namespace

std::string shape_in_brackets(const std::vector<std::uint64_t>& shape) {
  std::string text = "[";
  for (const std::uint64_t size : shape) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  }
  return text + "]";
}

AdapterTensors collect_tensors(const safetensors::Checkpoint& checkpoint) {
  AdapterTensors result;
  result.all.reserve(checkpoint.tensors().size());  // `factors` point into it
  for (const LocatedTensor& tensor : checkpoint.tensors()) {
    result.all.push_back({tensor, parse_tensor_key(tensor.entry->name)});
    const KeyedTensor& one = result.all.back();
    if (one.key.role != TensorRole::kA && one.key.role != TensorRole::kB) continue;
    Factors& factors = result.factors[one.key.module];
    factors.module = one.key.module;
    factors.embedding = factors.embedding || one.key.embedding;
    const KeyedTensor*& role = one.key.role == TensorRole::kA ? factors.a : factors.b;
    if (role != nullptr) {
      result.problems.push_back(
          {"key", one.name(), "its role is taken by " + in_quotes(role->name()), false});
    } else {
      role = &one;
    }
  }
  return result;
}

Placement place_factors(const AdapterTensors& tensors, const BaseModules& base,
                        const AdapterConfig* config) {
  return Placer(tensors, base, config).place();
}

std::vector<float> read_floats(const LocatedTensor& tensor) {
  std::vector<float> out;
  out.reserve(tensor.entry->elements);
  append_floats(tensor, 0, tensor.entry->elements, 1, out);
  return out;
}

std::vector<float> PlacedFactors::right(std::uint64_t expert) const {
  if (experts == 0) return read_floats(factors->a->tensor);
  if (!swapped) return expert_rows(factors->a->tensor, rank, expert);
  return transposed(expert_columns(factors->b->tensor, rank, experts, expert), inputs());
}

std::vector<float> PlacedFactors::left(std::uint64_t expert) const {
  if (experts == 0) return read_floats(factors->b->tensor);
  if (!swapped) return expert_columns(factors->b->tensor, rank, experts, expert);
  return transposed(expert_rows(factors->a->tensor, rank, expert), rank);
}

}  // namespace monograph
