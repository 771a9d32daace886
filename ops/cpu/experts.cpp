// monograph::experts and its gradients: a layer of experts on packed weights, with its LoRA.
#include "arguments/experts.h"

#include <algorithm>

#include "arguments/device.h"
#include "monograph/read_ahead/registry.h"

namespace monograph::ops {
namespace {

using Optional = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;
using Numbers = std::vector<std::int64_t>;

Tensor none(const char* op, const Tensor& x) { return empty(op, x, {0}, x.scalar_type()); }

Tensor like(const char* op, const Tensor& tensor) {
  return empty(op, tensor, {tensor.sizes().begin(), tensor.sizes().end()}, tensor.scalar_type());
}

// What all three operators take, as the schema has it.
struct ExpertsTensors {
  const Tensor &x, &ids, &weights;
  ExpertsWeight first, second;
  ExpertsNumbers numbers;
};

// Of each stack the slices of the experts that are routed to.
void note_experts(const ExpertsWeight& weight, const std::vector<std::size_t>& used,
                  std::size_t experts) {
  const auto note = [&](const Tensor& tensor) {
    const auto* begin = static_cast<const std::byte*>(tensor.const_data_ptr());
    const auto bytes = static_cast<std::size_t>(tensor.numel()) * tensor.element_size();
    if (bytes % experts != 0) return note_use(begin);
    for (const std::size_t expert : used) note_use(begin + expert * (bytes / experts));
  };
  note(weight.values);
  for (const Tensor& scale : weight.scales) note(scale);
}

void note_routed(const ExpertsTensors& given, const ExpertsProblem& problem) {
  if (!reads_ahead() || problem.experts == 0) return;
  std::vector<std::size_t> used(problem.ids, problem.ids + problem.all_slots());
  std::sort(used.begin(), used.end());
  used.erase(std::unique(used.begin(), used.end()), used.end());
  // Ids outside are slots that nobody computes; negative ones have become large.
  used.erase(std::lower_bound(used.begin(), used.end(), problem.experts), used.end());
  note_experts(given.first, used, problem.experts);
  note_experts(given.second, used, problem.experts);
}

// With `before` the arguments that a gradient has in front of them.
ExpertsArguments check_all(const char* op, const ExpertsTensors& given,
                           std::initializer_list<NamedTensors> before) {
  const auto& [x, ids, weights, first, second, numbers] = given;
  check_device(op, DeviceType::CPU, before);
  check_device(op, DeviceType::CPU,
               {{"x", x},
                {"ids", ids},
                {"weights", weights},
                {"values1", first.values},
                {"scales1", first.scales},
                {"bias1", first.bias},
                {"values2", second.values},
                {"scales2", second.scales},
                {"bias2", second.bias},
                {"a1", first.a},
                {"b1", first.b},
                {"a2", second.a},
                {"b2", second.b}});
  ExpertsArguments arguments = check_experts(op, x, ids, weights, first, second, numbers);
  note_routed(given, arguments.problem);
  return arguments;
}

std::tuple<Tensor, Tensor> experts_cpu(const Tensor& x, const Tensor& ids, const Tensor& weights,
                                       const Tensor& values1, const Tensors& scales1,
                                       const Numbers& layout1, const Optional& bias1,
                                       const Tensor& values2, const Tensors& scales2,
                                       const Numbers& layout2, const Optional& bias2,
                                       const Optional& a1, const Optional& b1, const Optional& a2,
                                       const Optional& b2, double lora_scale1, double lora_scale2,
                                       std::int64_t activation, bool interleaved, double alpha,
                                       double limit, bool transposed, bool save) {
  const char* const op = "experts";
  const ExpertsArguments arguments =
      check_all(op,
                {x,
                 ids,
                 weights,
                 {values1, scales1, layout1, bias1, a1, b1, lora_scale1},
                 {values2, scales2, layout2, bias2, a2, b2, lora_scale2},
                 {activation, interleaved, alpha, limit, transposed}},
                {});
  const ExpertsProblem& problem = arguments.problem;
  Tensor y = empty_rows(op, x, problem.down.out);
  const std::size_t rows = save ? problem.all_slots() : 0;
  Tensor pre =
      empty(op, x, {static_cast<std::int64_t>(rows), static_cast<std::int64_t>(problem.up.out)},
            x.scalar_type());
  monograph::experts(problem, y.mutable_data_ptr(), save ? pre.mutable_data_ptr() : nullptr,
                     torch_parallel_for);
  return {y, pre};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> experts_backward_cpu(
    const Tensor& dy, const Tensor& pre, const Tensor& x, const Tensor& ids, const Tensor& weights,
    const Tensor& values1, const Tensors& scales1, const Numbers& layout1, const Optional& bias1,
    const Tensor& values2, const Tensors& scales2, const Numbers& layout2, const Optional& bias2,
    const Optional& a1, const Optional& b1, const Optional& a2, const Optional& b2,
    double lora_scale1, double lora_scale2, std::int64_t activation, bool interleaved, double alpha,
    double limit, bool transposed, const std::vector<bool>& need) {
  const char* const op = "experts_backward";
  const ExpertsArguments arguments =
      check_all(op,
                {x,
                 ids,
                 weights,
                 {values1, scales1, layout1, bias1, a1, b1, lora_scale1},
                 {values2, scales2, layout2, bias2, a2, b2, lora_scale2},
                 {activation, interleaved, alpha, limit, transposed}},
                {{"dy", dy}, {"pre", pre}});
  STD_TORCH_CHECK(need.size() == 6, op, ": need has ", need.size(), " entries, wanted 6");
  const ExpertsGradientArguments given = check_experts_gradient(op, dy, pre, arguments);
  ExpertsGradients gradients;
  const auto wanted = [&](bool needed, const Tensor* tensor, void*& out) {
    if (!needed || tensor == nullptr) return none(op, x);
    Tensor made = like(op, *tensor);
    if (made.numel() != 0) out = made.mutable_data_ptr();
    return made;
  };
  const auto part = [](const Optional& tensor) { return tensor ? &*tensor : nullptr; };
  Tensor dx = wanted(need[0], &x, gradients.dx);
  Tensor dweights = wanted(need[1], &weights, gradients.dweights);
  Tensor dbias1 = wanted(need[2], part(bias1), gradients.dbias1);
  Tensor dbias2 = wanted(need[3], part(bias2), gradients.dbias2);
  Tensor da1 = wanted(need[4], part(a1), gradients.da1);
  Tensor db1 = wanted(need[4], part(b1), gradients.db1);
  Tensor da2 = wanted(need[5], part(a2), gradients.da2);
  Tensor db2 = wanted(need[5], part(b2), gradients.db2);
  monograph::experts_backward(arguments.problem, given.dy.matrix, given.pre_data(), gradients,
                              torch_parallel_for);
  return {dx, dweights, dbias1, dbias2, da1, db1, da2, db2};
}

std::tuple<Tensor, Tensor> experts_dw_cpu(
    const Tensor& dy, const Tensor& pre, const Tensor& x, const Tensor& ids, const Tensor& weights,
    const Tensor& values1, const Tensors& scales1, const Numbers& layout1, const Optional& bias1,
    const Tensor& values2, const Tensors& scales2, const Numbers& layout2, const Optional& bias2,
    const Optional& a1, const Optional& b1, const Optional& a2, const Optional& b2,
    double lora_scale1, double lora_scale2, std::int64_t activation, bool interleaved, double alpha,
    double limit, bool transposed) {
  const char* const op = "experts_dw";
  const ExpertsArguments arguments =
      check_all(op,
                {x,
                 ids,
                 weights,
                 {values1, scales1, layout1, bias1, a1, b1, lora_scale1},
                 {values2, scales2, layout2, bias2, a2, b2, lora_scale2},
                 {activation, interleaved, alpha, limit, transposed}},
                {{"dy", dy}, {"pre", pre}});
  const ExpertsProblem& problem = arguments.problem;
  STD_TORCH_CHECK(problem.up.weight.first.format == Format::kPlain &&
                      problem.down.weight.first.format == Format::kPlain,
                  op, ": the weights are packed, wanted plain ones");
  const ExpertsGradientArguments given = check_experts_gradient(op, dy, pre, arguments);
  Tensor d_values1 = like(op, values1), d_values2 = like(op, values2);
  monograph::experts_dw(problem, given.dy.matrix, given.pre_data(), d_values1.mutable_data_ptr(),
                        d_values2.mutable_data_ptr(), torch_parallel_for);
  return {d_values1, d_values2};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("experts", TORCH_BOX(&experts_cpu));
  m.impl("experts_backward", TORCH_BOX(&experts_backward_cpu));
  m.impl("experts_dw", TORCH_BOX(&experts_dw_cpu));
}

}  // namespace monograph::ops
