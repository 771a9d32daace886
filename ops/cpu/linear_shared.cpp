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
  const std::vector<LinearWeight> weights = check_weights(op, values, scales, layouts);
  const std::size_t n = weights.size();
  check_count(op, "bias", bias, n);
  check_count(op, "u", u, n);
  check_together(op, "u", u, "b", b);
  check_count(op, "a", a, u.size());
  const RowsArgument input = rows_of(op, "x", x);
  std::vector<RowsArgument> kept;  // views into tensors that must outlive the call
  std::vector<Tensor> owners(n), results;
  std::vector<LinearTerm> terms(n);
  std::vector<LinearOutput> outputs(n);
  kept.reserve(2 * n);
  for (std::size_t i = 0; i < n; ++i) {
    STD_TORCH_CHECK(input.matrix.cols == weights[i].packed.cols, op, ": x has ", input.matrix.cols,
                    " columns, weight ", i, " has ", weights[i].packed.cols);
    outputs[i].weight = weights[i];
    if (!bias.empty()) {
      kept.push_back(vector_of(op, "bias", bias[i], weights[i].packed.rows, input.dtype));
      outputs[i].bias = kept.back().matrix.data;
    }
    if (!u.empty()) {
      kept.push_back(rows_matching(op, "u", u[i], x, input));
      const std::size_t rank = kept.back().matrix.cols;
      terms[i] = {kept.back().matrix,
                  plain_weight(op, "b", b[i], weights[i].packed.rows, rank, owners[i])};
      outputs[i].low_rank = {&terms[i], 1};
      if (!a.empty()) check_a(op, a[i], rank, input.matrix.cols);
    }
    results.push_back(empty_rows(op, x, weights[i].packed.rows));
    outputs[i].y = mutable_rows(results.back(), input.matrix.rows, weights[i].packed.rows);
  }
  std::erase_if(outputs, [](const LinearOutput& output) { return output.y.cols == 0; });
  if (!outputs.empty()) linear(input.dtype, input.matrix, outputs, torch_parallel_for);
  return results;
}

Tensor linear_shared_dx_cpu(const std::vector<Tensor>& dy, const std::vector<Tensor>& values,
                            const std::vector<Tensor>& scales,
                            const std::vector<std::int64_t>& layouts, const std::vector<Tensor>& du,
                            const std::vector<Tensor>& a) {
  const char* const op = "linear_shared_dx";
  check_device(op, DeviceType::CPU,
               {{"dy", dy}, {"values", values}, {"scales", scales}, {"du", du}, {"a", a}});
  const std::vector<LinearWeight> weights = check_weights(op, values, scales, layouts);
  const std::size_t n = weights.size();
  STD_TORCH_CHECK(dy.size() == n, op, ": dy has ", dy.size(), " entries, wanted ", n);
  check_count(op, "du", du, n);
  check_together(op, "du", du, "a", a);
  const RowsArgument first = rows_of(op, "dy", dy[0]);
  const std::size_t rows = first.matrix.rows, cols = weights[0].packed.cols;
  std::vector<RowsArgument> kept;
  std::vector<Tensor> owners(n);
  std::vector<LinearTerm> terms;
  kept.reserve(2 * n);
  terms.reserve(2 * n);
  for (std::size_t i = 0; i < n; ++i) {
    STD_TORCH_CHECK(weights[i].packed.cols == cols, op, ": weight ", i, " has ",
                    weights[i].packed.cols, " columns, weight 0 has ", cols);
    kept.push_back(rows_matching(op, "dy", dy[i], dy[0], first));
    STD_TORCH_CHECK(kept.back().matrix.cols == weights[i].packed.rows, op, ": dy[", i, "] has ",
                    kept.back().matrix.cols, " columns, weight ", i, " has ",
                    weights[i].packed.rows, " rows");
    terms.push_back({kept.back().matrix, weights[i]});
  }
  for (std::size_t i = 0; i < du.size(); ++i) {
    kept.push_back(rows_matching(op, "du", du[i], dy[0], first));
    const std::size_t rank = kept.back().matrix.cols;
    terms.push_back({kept.back().matrix, plain_weight(op, "a", a[i], rank, cols, owners[i])});
  }
  Tensor dx = empty_rows(op, dy[0], cols);
  if (cols == 0) return dx;
  linear_dx(first.dtype, terms, mutable_rows(dx, rows, cols), torch_parallel_for);
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("linear_shared", TORCH_BOX(&linear_shared_cpu));
  m.impl("linear_shared_dx", TORCH_BOX(&linear_shared_dx_cpu));
}

}  // namespace monograph::ops
