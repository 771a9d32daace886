// monograph::rms_norm_gated and its backward: the norm of rows times the activation of a gate.
#include "monograph/kernels/rms_norm_gated/rms_norm_gated.h"

#include <optional>
#include <tuple>
#include <vector>

#include "arguments/device.h"
#include "arguments/linear.h"
#include "cpu/norm_gain.h"

namespace monograph::ops {
namespace {

std::vector<std::int64_t> shape_of(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }

struct Arguments {
  RowsArgument x, z;
  std::vector<float> gain;
  GatedNormProblem problem;
};

Arguments check_arguments(const char* op, const Tensor& x, const Tensor& z,
                          const std::optional<Tensor>& weight, double eps, std::int64_t gate,
                          bool round_before_weight) {
  Arguments found = {rows_of(op, "x", x), {}, {}, {}};
  found.z = rows_like(op, "z", z, x, found.x, found.x.dtype);
  const Matrix& rows = found.x.matrix;
  found.gain = gain_of(op, "weight", weight, rows.rows, rows.cols, false);
  STD_TORCH_CHECK(gate == 0 || gate == 1, op, ": gate is ", gate,
                  ", wanted 0 (silu) or 1 (sigmoid)");
  GatedNormProblem& problem = found.problem;
  problem.dtype = found.x.dtype;
  problem.gate = gate == 0 ? Gate::kSilu : Gate::kSigmoid;
  problem.rounding = rounding_of(round_before_weight);
  problem.round_product = weight && weight->scalar_type() == x.scalar_type();
  problem.rows = rows.rows;
  problem.cols = rows.cols;
  problem.x = rows.data;
  problem.z = found.z.matrix.data;
  problem.x_stride = rows.stride;
  problem.z_stride = found.z.matrix.stride;
  problem.gain = found.gain.data();
  problem.eps = epsilon_of(op, eps);
  return found;
}

Tensor rms_norm_gated_cpu(const Tensor& x, const Tensor& z, const std::optional<Tensor>& weight,
                          double eps, std::int64_t gate, bool round_before_weight) {
  const char* const op = "rms_norm_gated";
  check_device(op, DeviceType::CPU, {{"x", x}, {"z", z}, {"weight", weight}});
  const Arguments given = check_arguments(op, x, z, weight, eps, gate, round_before_weight);
  Tensor y = empty(op, x, shape_of(x), x.scalar_type());
  rms_norm_gated({given.problem, y.mutable_data_ptr()}, torch_parallel_for);
  return y;
}

std::tuple<Tensor, Tensor, Tensor> rms_norm_gated_backward_cpu(const Tensor& dy, const Tensor& x,
                                                               const Tensor& z,
                                                               const std::optional<Tensor>& weight,
                                                               double eps, std::int64_t gate,
                                                               bool round_before_weight) {
  const char* const op = "rms_norm_gated_backward";
  check_device(op, DeviceType::CPU, {{"dy", dy}, {"x", x}, {"z", z}, {"weight", weight}});
  const Arguments given = check_arguments(op, x, z, weight, eps, gate, round_before_weight);
  const RowsArgument gradient = rows_like(op, "dy", dy, x, given.x, given.x.dtype);
  Tensor dx = empty(op, x, shape_of(x), x.scalar_type());
  Tensor dz = empty(op, x, shape_of(x), x.scalar_type());
  const auto cols = static_cast<std::int64_t>(given.problem.cols);
  Tensor dweight = empty(op, x, {weight ? cols : 0}, ScalarType::Float);
  GatedNormBackward job = {};
  job.problem = given.problem;
  job.dy = gradient.matrix.data;
  job.dy_stride = gradient.matrix.stride;
  job.dx = dx.mutable_data_ptr();
  job.dz = dz.mutable_data_ptr();
  if (weight) job.dgain = static_cast<float*>(dweight.mutable_data_ptr());
  rms_norm_gated_backward(job, torch_parallel_for);
  return {dx, dz, dweight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("rms_norm_gated", TORCH_BOX(&rms_norm_gated_cpu));
  m.impl("rms_norm_gated_backward", TORCH_BOX(&rms_norm_gated_backward_cpu));
}

}  // namespace monograph::ops
