// monograph::experts_slots and its gradients: a list of slots, computed where their experts are.
#include "routed_experts.h"

namespace monograph::ops {
namespace {

using Optional = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;
using Numbers = std::vector<std::int64_t>;

// Each slot has a row of x and an expert here. A skipped slot would be a row of zeros that looks
// like a result, so an id outside is an error too.
void check_slots(const char* op, const ExpertsProblem& problem) {
  const auto inside = [](std::int64_t number, std::size_t count) {
    return static_cast<std::uint64_t>(number) < count;
  };
  for (std::size_t slot = 0; slot < problem.tokens; ++slot) {
    STD_TORCH_CHECK(inside(problem.ids[slot], problem.experts), op, ": ids[", slot, "] is ",
                    problem.ids[slot], ", wanted 0 to ",
                    static_cast<std::int64_t>(problem.experts) - 1);
    STD_TORCH_CHECK(inside(problem.slot_rows[slot], problem.x.rows), op, ": rows[", slot, "] is ",
                    problem.slot_rows[slot], ", wanted 0 to ",
                    static_cast<std::int64_t>(problem.x.rows) - 1);
  }
}

Tensor experts_slots_cpu(const Tensor& x, const Tensor& rows, const Tensor& ids,
                         const Tensor& values1, const Tensors& scales1, const Numbers& layout1,
                         const Optional& bias1, const Tensor& values2, const Tensors& scales2,
                         const Numbers& layout2, const Optional& bias2, const Optional& a1,
                         const Optional& b1, const Optional& a2, const Optional& b2,
                         double lora_scale1, double lora_scale2, std::int64_t activation,
                         bool interleaved, double alpha, double limit, bool transposed) {
  const char* const op = "experts_slots";
  const ExpertsWeight first = {values1, scales1, layout1, bias1, a1, b1, lora_scale1};
  const ExpertsWeight second = {values2, scales2, layout2, bias2, a2, b2, lora_scale2};
  check_experts_devices(op, first, second, {{"x", x}, {"rows", rows}, {"ids", ids}});
  const ExpertsArguments arguments =
      check_experts_slots(op, x, rows, ids, nullptr, first, second,
                          {activation, interleaved, alpha, limit, transposed});
  const ExpertsProblem& problem = arguments.problem;
  check_slots(op, problem);
  note_routed(first, second, problem);
  Tensor d =
      empty(op, x, {ids.size(0), static_cast<std::int64_t>(problem.down.out)}, x.scalar_type());
  monograph::experts(problem, d.mutable_data_ptr(), nullptr, torch_parallel_for);
  return d;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
experts_slots_backward_cpu(const Tensor& dy, const Tensor& x, const Tensor& rows, const Tensor& ids,
                           const Tensor& weights, const Tensor& values1, const Tensors& scales1,
                           const Numbers& layout1, const Optional& bias1, const Tensor& values2,
                           const Tensors& scales2, const Numbers& layout2, const Optional& bias2,
                           const Optional& a1, const Optional& b1, const Optional& a2,
                           const Optional& b2, double lora_scale1, double lora_scale2,
                           std::int64_t activation, bool interleaved, double alpha, double limit,
                           bool transposed, const std::vector<bool>& need) {
  const char* const op = "experts_slots_backward";
  const ExpertsWeight first = {values1, scales1, layout1, bias1, a1, b1, lora_scale1};
  const ExpertsWeight second = {values2, scales2, layout2, bias2, a2, b2, lora_scale2};
  check_experts_devices(op, first, second,
                        {{"dy", dy}, {"x", x}, {"rows", rows}, {"ids", ids}, {"weights", weights}});
  const ExpertsArguments arguments =
      check_experts_slots(op, x, rows, ids, &weights, first, second,
                          {activation, interleaved, alpha, limit, transposed});
  const RowsArgument dy_rows = check_experts_dy(op, dy, arguments);
  check_slots(op, arguments.problem);
  note_routed(first, second, arguments.problem);
  ExpertsGradientTensors made = make_gradients(op, x, ids.size(0), weights, first, second, need);
  monograph::experts_backward(arguments.problem, dy_rows.matrix, nullptr, made.views,
                              torch_parallel_for);
  return {made.dx, made.dweights, made.dbias1, made.dbias2, made.da1, made.db1, made.da2, made.db2};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("experts_slots", TORCH_BOX(&experts_slots_cpu));
  m.impl("experts_slots_backward", TORCH_BOX(&experts_slots_backward_cpu));
}

}  // namespace monograph::ops
