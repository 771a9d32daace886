// monograph::linear_shared and linear_shared_dx: several weights that share one x (q, k and v; gate
// and up). x is packed once, and its gradient is one pass over all terms.
//
// bias, u, b and a are empty or have one entry per weight.
#include "arguments/linear_shared.h"

#include <vector>

#include "arguments/device.h"
#include "monograph/kernels/linear/linear.h"

namespace monograph::ops {
namespace {

std::vector<Tensor> linear_shared_cpu(const Tensor& x, const std::vector<Tensor>& values,
                                      const std::vector<Tensor>& scales,
                                      const std::vector<std::int64_t>& layouts,
                                      const std::vector<Tensor>& bias, const std::vector<Tensor>& u,
                                      const std::vector<Tensor>& b, const std::vector<Tensor>& a) {
  const char* const op = "linear_shared";
  check_device(op, DeviceType::CPU,
               {{"x", x},
                {"values", values},
                {"scales", scales},
                {"bias", bias},
                {"u", u},
                {"b", b},
                {"a", a}});
  const LinearSharedArguments found =
      check_linear_shared(op, x, values, scales, layouts, bias, u, b, a);
  std::vector<Tensor> results;
  std::vector<LinearOutput> outputs;
  for (std::size_t i = 0; i < found.weights.size(); ++i) {
    const std::size_t cols = found.weights[i].packed.rows;
    results.push_back(empty_rows(op, x, cols));
    LinearOutput output;
    output.weight = found.weights[i];
    if (!bias.empty()) output.bias = found.bias[i].matrix.data;
    if (!u.empty()) output.low_rank = {&found.low_rank[i], 1};
    output.y = mutable_rows(results.back(), found.x.matrix.rows, cols);
    if (cols != 0) outputs.push_back(output);
  }
  if (!outputs.empty()) linear(found.x.dtype, found.x.matrix, outputs, torch_parallel_for);
  return results;
}

Tensor linear_shared_dx_cpu(const std::vector<Tensor>& dy, const std::vector<Tensor>& values,
                            const std::vector<Tensor>& scales,
                            const std::vector<std::int64_t>& layouts, const std::vector<Tensor>& du,
                            const std::vector<Tensor>& a) {
  const char* const op = "linear_shared_dx";
  check_device(op, DeviceType::CPU,
               {{"dy", dy}, {"values", values}, {"scales", scales}, {"du", du}, {"a", a}});
  const LinearSharedDxArguments found =
      check_linear_shared_dx(op, dy, values, scales, layouts, du, a);
  const RowsArgument& first = found.dy[0];
  const std::size_t rows = first.matrix.rows, cols = found.terms[0].weight.packed.cols;
  Tensor dx = empty_rows(op, dy[0], cols);
  if (cols == 0) return dx;
  linear_dx(first.dtype, found.terms, mutable_rows(dx, rows, cols), torch_parallel_for);
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("linear_shared", TORCH_BOX(&linear_shared_cpu));
  m.impl("linear_shared_dx", TORCH_BOX(&linear_shared_dx_cpu));
}

}  // namespace monograph::ops
