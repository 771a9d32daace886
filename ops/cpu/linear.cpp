// monograph::linear and linear_dx: a linear layer on a packed weight, with its low-rank part.
#include "monograph/kernels/linear/linear.h"

#include "arguments/device.h"
#include "arguments/linear.h"

namespace monograph::ops {
namespace {

// `a` is only checked here: it tells the autograd formula that u = x * a^T.
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
  const LinearWeight weight = check_weight(op, values, scales, layout);
  const RowsArgument input = rows_of(op, "x", x);
  STD_TORCH_CHECK(input.matrix.cols == weight.packed.cols, op, ": x has ", input.matrix.cols,
                  " columns, the weight has ", weight.packed.cols);
  STD_TORCH_CHECK(u.has_value() == b.has_value(), op, ": u and b must come together");
  STD_TORCH_CHECK(u || !a, op, ": a is given without u and b, wanted all three");
  LinearOutput output = {weight, {}, nullptr, {}};
  std::optional<RowsArgument> bias_row, low;
  if (bias) {
    bias_row = vector_of(op, "bias", *bias, weight.packed.rows, input.dtype);
    output.bias = bias_row->matrix.data;
  }
  LinearTerm term;
  Tensor b_owner;
  if (u) {
    low = rows_beside(op, "u", *u, x, input);
    term = {low->matrix, plain_weight(op, "b", *b, weight.packed.rows, low->matrix.cols, b_owner)};
    output.low_rank = {&term, 1};
    if (a) check_a(op, *a, low->matrix.cols, weight.packed.cols);
  }
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
  const LinearWeight weight = check_weight(op, values, scales, layout);
  const RowsArgument gradient = rows_of(op, "dy", dy);
  STD_TORCH_CHECK(gradient.matrix.cols == weight.packed.rows, op, ": dy has ", gradient.matrix.cols,
                  " columns, the weight has ", weight.packed.rows, " rows");
  STD_TORCH_CHECK(du.has_value() == a.has_value(), op, ": du and a must come together");
  LinearTerm terms[2] = {{gradient.matrix, weight}, {}};
  std::optional<RowsArgument> low;
  Tensor a_owner;
  if (du) {
    low = rows_beside(op, "du", *du, dy, gradient);
    terms[1] = {low->matrix,
                plain_weight(op, "a", *a, low->matrix.cols, weight.packed.cols, a_owner)};
  }
  Tensor dx = empty_rows(op, dy, weight.packed.cols);
  if (weight.packed.cols == 0) return dx;
  linear_dx(gradient.dtype, {terms, du ? std::size_t{2} : std::size_t{1}},
            mutable_rows(dx, gradient.matrix.rows, weight.packed.cols), torch_parallel_for);
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear_cpu));
  m.impl("linear_dx", TORCH_BOX(&linear_dx_cpu));
}

}  // namespace monograph::ops
