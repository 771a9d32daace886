// monograph::linear and linear_dx: a linear layer on a packed weight, with its low-rank part.
#include "monograph/kernels/linear/linear.h"

#include "arguments/device.h"
#include "arguments/linear.h"

namespace monograph::ops {
namespace {

Tensor linear_cpu(const Tensor& x, const Tensor& values, const std::vector<Tensor>& scales,
                  const std::vector<std::int64_t>& layout, const std::optional<Tensor>& bias,
                  const std::optional<Tensor>& u, const std::optional<Tensor>& b,
                  const std::optional<Tensor>& a) {
  const char* const op = "linear";
  check_device(op, DeviceType::CPU,
               {{"x", x},
                {"values", values},
                {"scales", scales},
                {"bias", bias},
                {"u", u},
                {"b", b},
                {"a", a}});
  const LinearArguments arguments = check_linear(op, x, values, scales, layout, bias, u, b, a);
  const LinearWeight& weight = arguments.weight;
  const RowsArgument& input = arguments.x;
  LinearOutput output = {weight, {}, nullptr, {}};
  if (bias) output.bias = arguments.bias->matrix.data;
  if (u) output.low_rank = {&arguments.low_rank, 1};
  Tensor y = empty_rows(op, x, weight.packed.rows);
  if (weight.packed.rows == 0) return y;
  output.y = mutable_rows(y, input.matrix.rows, weight.packed.rows);
  linear(input.dtype, input.matrix, {&output, 1}, torch_parallel_for);
  return y;
}

Tensor linear_dx_cpu(const Tensor& dy, const Tensor& values, const std::vector<Tensor>& scales,
                     const std::vector<std::int64_t>& layout, const std::optional<Tensor>& du,
                     const std::optional<Tensor>& a) {
  const char* const op = "linear_dx";
  check_device(op, DeviceType::CPU,
               {{"dy", dy}, {"values", values}, {"scales", scales}, {"du", du}, {"a", a}});
  const LinearDxArguments arguments = check_linear_dx(op, dy, values, scales, layout, du, a);
  const std::size_t rows = arguments.dy.matrix.rows, cols = arguments.terms[0].weight.packed.cols;
  Tensor dx = empty_rows(op, dy, cols);
  if (cols == 0) return dx;
  linear_dx(arguments.dy.dtype, {arguments.terms, du ? std::size_t{2} : std::size_t{1}},
            mutable_rows(dx, rows, cols), torch_parallel_for);
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear_cpu));
  m.impl("linear_dx", TORCH_BOX(&linear_dx_cpu));
}

}  // namespace monograph::ops
