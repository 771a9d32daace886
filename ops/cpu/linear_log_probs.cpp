// monograph::linear_log_probs: what a trainer asks of a head beside the loss, without its logits.
#include <tuple>

#include "arguments/device.h"
#include "cpu/labels.h"

namespace monograph::ops {
namespace {

// Log-probabilities, entropy, squares, mean, top, log-sum-exp, dx.
using LogProbs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

LogProbs linear_log_probs_cpu(const Tensor& x, const Tensor& values,
                              const std::vector<Tensor>& scales,
                              const std::vector<std::int64_t>& layout,
                              const std::optional<Tensor>& bias, const Tensor& labels,
                              double softcap, double scale, bool need_dx) {
  const char* const op = "linear_log_probs";
  check_device(
      op, DeviceType::CPU,
      {{"x", x}, {"values", values}, {"scales", scales}, {"bias", bias}, {"labels", labels}});
  const HeadArguments a =
      check_head_and_labels(op, x, values, scales, layout, bias, labels, softcap, scale);
  const Matrix& rows = a.x.matrix;
  const auto data = [](Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); };
  Tensor log_probs = float_vector(x, rows.rows), lse = float_vector(x, rows.rows);
  Tensor entropy = float_vector(x, rows.rows), squares = float_vector(x, rows.rows);
  Tensor mean = float_vector(x, rows.rows);
  Tensor top =
      torch::stable::new_empty(x, {static_cast<std::int64_t>(rows.rows)}, ScalarType::Bool);
  Tensor dx = need_dx ? empty_rows(op, x, rows.cols) : torch::stable::new_empty(x, {0});
  const TokenStatistics statistics = {data(entropy), data(squares), data(mean),
                                      static_cast<bool*>(top.mutable_data_ptr())};
  float* const loss = data(log_probs);
  linear_cross_entropy(
      a.problem,
      {loss, data(lse), need_dx ? mutable_rows(dx, rows.rows, rows.cols) : MutableMatrix{},
       &statistics},
      torch_parallel_for);
  for (std::size_t t = 0; t < rows.rows; ++t) loss[t] = -loss[t];
  return {log_probs, entropy, squares, mean, top, lse, dx};
}

Tensor linear_entropy_dx_cpu(const Tensor& x, const Tensor& values,
                             const std::vector<Tensor>& scales,
                             const std::vector<std::int64_t>& layout,
                             const std::optional<Tensor>& bias, const Tensor& labels,
                             const Tensor& lse, const Tensor& entropy, const Tensor& g,
                             double softcap, double scale) {
  const char* const op = "linear_entropy_dx";
  check_device(op, DeviceType::CPU,
               {{"x", x},
                {"values", values},
                {"scales", scales},
                {"bias", bias},
                {"labels", labels},
                {"lse", lse},
                {"entropy", entropy},
                {"g", g}});
  const HeadArguments a =
      check_head_and_labels(op, x, values, scales, layout, bias, labels, softcap, scale);
  const std::size_t tokens = a.x.matrix.rows;
  const RowsArgument sums = vector_of(op, "lse", lse, tokens, DType::kFloat32);
  const RowsArgument found = vector_of(op, "entropy", entropy, tokens, DType::kFloat32);
  const RowsArgument factors = vector_of(op, "g", g, tokens, DType::kFloat32);
  const auto data = [](const RowsArgument& r) { return static_cast<const float*>(r.matrix.data); };
  Tensor dx = empty_rows(op, x, a.x.matrix.cols);
  linear_entropy_dx(
      a.problem,
      {data(sums), data(found), data(factors), mutable_rows(dx, tokens, a.x.matrix.cols)},
      torch_parallel_for);
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("linear_log_probs", TORCH_BOX(&linear_log_probs_cpu));
  m.impl("linear_entropy_dx", TORCH_BOX(&linear_entropy_dx_cpu));
}

}  // namespace monograph::ops
