// monograph::experts and its gradients: a layer of experts on packed weights, with its LoRA.
#include "routed_experts.h"

namespace monograph::ops {
namespace {

using Optional = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;
using Numbers = std::vector<std::int64_t>;

Tensor like(const char* op, const Tensor& tensor) {
  return empty(op, tensor, {tensor.sizes().begin(), tensor.sizes().end()}, tensor.scalar_type());
}

// What all three operators take, as the schema has it.
struct ExpertsTensors {
  const Tensor &x, &ids, &weights;
  ExpertsWeight first, second;
  ExpertsNumbers numbers;
};

// With `before` the arguments that a gradient has in front of them.
ExpertsArguments check_all(const char* op, const ExpertsTensors& given,
                           std::initializer_list<NamedTensors> before) {
  const auto& [x, ids, weights, first, second, numbers] = given;
  check_device(op, DeviceType::CPU, before);
  check_experts_devices(op, first, second, {{"x", x}, {"ids", ids}, {"weights", weights}});
  ExpertsArguments arguments = check_experts(op, x, ids, weights, first, second, numbers);
  note_routed(first, second, arguments.problem);
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
  const ExpertsTensors given = {x,
                                ids,
                                weights,
                                {values1, scales1, layout1, bias1, a1, b1, lora_scale1},
                                {values2, scales2, layout2, bias2, a2, b2, lora_scale2},
                                {activation, interleaved, alpha, limit, transposed}};
  const ExpertsArguments arguments = check_all(op, given, {{"dy", dy}, {"pre", pre}});
  const ExpertsGradientArguments rows = check_experts_gradient(op, dy, pre, arguments);
  ExpertsGradientTensors made =
      make_gradients(op, x, x.size(0), weights, given.first, given.second, need);
  monograph::experts_backward(arguments.problem, rows.dy.matrix, rows.pre_data(), made.views,
                              torch_parallel_for);
  return {made.dx, made.dweights, made.dbias1, made.dbias2, made.da1, made.db1, made.da2, made.db2};
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
