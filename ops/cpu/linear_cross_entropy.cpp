// monograph::linear_cross_entropy and its weight gradient: the loss of a head without its logits.
#include <tuple>

#include "arguments/device.h"
#include "cpu/labels.h"

namespace monograph::ops {
namespace {

std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_cpu(const Tensor& x, const Tensor& values,
                                                            const std::vector<Tensor>& scales,
                                                            const std::vector<std::int64_t>& layout,
                                                            const std::optional<Tensor>& bias,
                                                            const Tensor& labels, double softcap,
                                                            double scale, bool need_dx) {
  const char* const op = "linear_cross_entropy";
  check_device(
      op, DeviceType::CPU,
      {{"x", x}, {"values", values}, {"scales", scales}, {"bias", bias}, {"labels", labels}});
  const HeadArguments a =
      check_head_and_labels(op, x, values, scales, layout, bias, labels, softcap, scale);
  const Matrix& rows = a.x.matrix;
  Tensor loss = float_vector(x, rows.rows), lse = float_vector(x, rows.rows);
  Tensor dx = need_dx ? empty_rows(op, x, rows.cols) : torch::stable::new_empty(x, {0});
  const MutableMatrix out = need_dx ? mutable_rows(dx, rows.rows, rows.cols) : MutableMatrix{};
  linear_cross_entropy(a.problem,
                       {static_cast<float*>(loss.mutable_data_ptr()),
                        static_cast<float*>(lse.mutable_data_ptr()), out},
                       torch_parallel_for);
  return {loss, lse, dx};
}

std::tuple<Tensor, Tensor> linear_cross_entropy_dw_cpu(const Tensor& x, const Tensor& weight,
                                                       const std::optional<Tensor>& bias,
                                                       const Tensor& labels, const Tensor& lse,
                                                       const Tensor& g, double softcap,
                                                       double scale) {
  const char* const op = "linear_cross_entropy_dw";
  check_device(
      op, DeviceType::CPU,
      {{"x", x}, {"weight", weight}, {"bias", bias}, {"labels", labels}, {"lse", lse}, {"g", g}});
  check_given(op, "weight", weight);
  STD_TORCH_CHECK(weight.dim() == 2, op, ": the weight has ", weight.dim(),
                  " dimensions, wanted [rows, cols]");
  const Tensor values = torch::stable::contiguous(weight);
  const HeadArguments a = check_head_and_labels(
      op, x, values, {}, {0, 0, weight.size(0), weight.size(1)}, bias, labels, softcap, scale);
  const std::size_t tokens = a.x.matrix.rows;
  const RowsArgument sums = vector_of(op, "lse", lse, tokens, DType::kFloat32);
  const RowsArgument factors = vector_of(op, "g", g, tokens, DType::kFloat32);
  Tensor dw = torch::stable::new_empty(weight, weight.sizes(), x.scalar_type());
  Tensor dbias = float_vector(x, bias ? a.problem.weight.packed.rows : 0);
  linear_cross_entropy_dw(
      a.problem,
      {static_cast<const float*>(sums.matrix.data), static_cast<const float*>(factors.matrix.data),
       mutable_rows(dw, a.problem.weight.packed.rows, a.problem.weight.packed.cols),
       bias ? static_cast<float*>(dbias.mutable_data_ptr()) : nullptr},
      torch_parallel_for);
  return {dw, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("linear_cross_entropy", TORCH_BOX(&linear_cross_entropy_cpu));
  m.impl("linear_cross_entropy_dw", TORCH_BOX(&linear_cross_entropy_dw_cpu));
}

}  // namespace monograph::ops
