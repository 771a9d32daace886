// monograph::rms_norm and its backward: the norm of rows, with the residual stream added before it.
#include "monograph/kernels/rms_norm/rms_norm.h"

#include <optional>
#include <tuple>
#include <vector>

#include "arguments/device.h"
#include "arguments/linear.h"
#include "cpu/norm_gain.h"

namespace monograph::ops {
namespace {

// As torch promotes x * weight; Gemma's norm, which multiplies in float32, rounds to the type of x.
ScalarType type_of_y(const Tensor& x, const std::optional<Tensor>& weight,
                     bool round_before_weight) {
  const bool same = !weight || !round_before_weight || weight->scalar_type() == x.scalar_type();
  return same ? x.scalar_type() : ScalarType::Float;
}

std::vector<std::int64_t> shape_of(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }

std::tuple<Tensor, Tensor> rms_norm_cpu(const Tensor& x, const std::optional<Tensor>& weight,
                                        const std::optional<Tensor>& residual, double eps,
                                        bool one_plus_weight, bool round_before_weight) {
  const char* const op = "rms_norm";
  check_device(op, DeviceType::CPU, {{"x", x}, {"weight", weight}, {"residual", residual}});
  const RowsArgument input = rows_of(op, "x", x);
  const std::size_t cols = input.matrix.cols;
  const std::vector<float> gain =
      gain_of(op, "weight", weight, input.matrix.rows, cols, one_plus_weight);
  RmsNormForward job = {};
  job.dtype = input.dtype;
  job.rounding = rounding_of(round_before_weight);
  job.rows = input.matrix.rows;
  job.cols = cols;
  job.x = input.matrix.data;
  job.x_stride = input.matrix.stride;
  job.gain = gain.data();
  job.eps = epsilon_of(op, eps);
  RowsArgument added;
  Tensor sum = empty(op, x, residual ? shape_of(x) : std::vector<std::int64_t>{0}, x.scalar_type());
  if (residual) {
    added = rows_like(op, "residual", *residual, x, input, input.dtype);
    job.residual = added.matrix.data;
    job.residual_stride = added.matrix.stride;
    job.sum = sum.mutable_data_ptr();
  }
  const ScalarType type = type_of_y(x, weight, round_before_weight);
  job.out_dtype = dtype_of(type, op, "y");
  Tensor y = empty(op, x, shape_of(x), type);
  job.y = y.mutable_data_ptr();
  rms_norm(job, torch_parallel_for);
  return {y, sum};
}

std::tuple<Tensor, Tensor> rms_norm_backward_cpu(const Tensor& dy,
                                                 const std::optional<Tensor>& dsum, const Tensor& x,
                                                 const std::optional<Tensor>& weight, double eps,
                                                 bool one_plus_weight, bool round_before_weight,
                                                 bool need_dweight) {
  const char* const op = "rms_norm_backward";
  check_device(op, DeviceType::CPU, {{"dy", dy}, {"dsum", dsum}, {"x", x}, {"weight", weight}});
  const RowsArgument input = rows_of(op, "x", x);
  const std::size_t cols = input.matrix.cols;
  const std::vector<float> gain =
      gain_of(op, "weight", weight, input.matrix.rows, cols, one_plus_weight);
  STD_TORCH_CHECK(weight || !need_dweight, op, ": need_dweight is true, but weight is None");
  RmsNormBackward job = {};
  job.dtype = input.dtype;
  job.out_dtype = dtype_of(type_of_y(x, weight, round_before_weight), op, "y");
  job.rounding = rounding_of(round_before_weight);
  job.rows = input.matrix.rows;
  job.cols = cols;
  job.x = input.matrix.data;
  job.x_stride = input.matrix.stride;
  job.gain = gain.data();
  job.eps = epsilon_of(op, eps);
  const RowsArgument given = rows_like(op, "dy", dy, x, input, job.out_dtype);
  job.dy = given.matrix.data;
  job.dy_stride = given.matrix.stride;
  RowsArgument passed;
  if (dsum) {
    passed = rows_like(op, "dsum", *dsum, x, input, input.dtype);
    job.dsum = passed.matrix.data;
    job.dsum_stride = passed.matrix.stride;
  }
  Tensor dx = empty(op, x, shape_of(x), x.scalar_type());
  job.dx = dx.mutable_data_ptr();
  const std::int64_t size = need_dweight ? static_cast<std::int64_t>(cols) : 0;
  Tensor dweight = empty(op, x, {size}, ScalarType::Float);
  if (need_dweight) job.dgain = static_cast<float*>(dweight.mutable_data_ptr());
  rms_norm_backward(job, torch_parallel_for);
  return {dx, dweight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm_cpu));
  m.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward_cpu));
}

}  // namespace monograph::ops
