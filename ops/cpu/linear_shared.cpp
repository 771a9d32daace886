// monograph::linear_shared and linear_shared_dx: several weights that share one x (q, k and v; gate
// and up). x is packed once, and its gradient is one pass over all terms.
//
// `layouts` holds the layout of each weight (packed.h) and behind it the number of its scales;
// `scales` the scales of all weights in order. bias, u, b and a are empty or have one entry a
// weight.
#include <algorithm>
#include <span>
#include <vector>

#include "arguments/device.h"
#include "arguments/linear.h"
#include "monograph/kernels/linear/linear.h"

namespace monograph::ops {
namespace {

// The layouts of all weights and their numbers of scales, read one after the other.
struct SharedLayouts {
  std::vector<Layout> layouts;
  std::vector<std::size_t> scales;
};

SharedLayouts read_layouts(const char* op, std::size_t weights, std::size_t scales,
                           const std::vector<std::int64_t>& numbers) {
  // Without a version the length alone says whether there is one for each weight.
  const bool versioned = std::any_of(numbers.begin(), numbers.end(), [](auto n) { return n < 0; });
  STD_TORCH_CHECK(weights != 0 && (versioned || numbers.size() == 5 * weights), op,
                  ": layouts has ", numbers.size(), " entries, wanted 5 for each of the ", weights,
                  " weights");
  SharedLayouts read;
  std::span<const std::int64_t> rest = numbers;
  std::size_t used = 0;
  for (std::size_t i = 0; i < weights; ++i) {
    read.layouts.push_back(take_layout(op, rest));
    STD_TORCH_CHECK(!rest.empty(), op, ": layouts ends before the number of scales of weight ", i);
    const std::int64_t count = rest.front();
    rest = rest.subspan(1);
    STD_TORCH_CHECK(count >= 0 && static_cast<std::size_t>(count) <= scales - used, op,
                    ": layouts claims ", count, " scales for weight ", i, ", ", scales - used,
                    " of ", scales, " are left");
    read.scales.push_back(static_cast<std::size_t>(count));
    used += read.scales.back();
  }
  STD_TORCH_CHECK(rest.empty(), op, ": layouts has ", rest.size(), " entries behind those of the ",
                  weights, " weights, wanted none");
  STD_TORCH_CHECK(used == scales, op, ": ", scales, " scales, layouts claims ", used);
  return read;
}

std::vector<LinearWeight> check_weights(const char* op, const std::vector<Tensor>& values,
                                        const std::vector<Tensor>& scales,
                                        const std::vector<std::int64_t>& layouts) {
  const SharedLayouts read = read_layouts(op, values.size(), scales.size(), layouts);
  std::vector<LinearWeight> weights;
  weights.reserve(values.size());
  auto first = scales.begin();
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto last = first + static_cast<std::ptrdiff_t>(read.scales[i]);
    weights.push_back(check_weight(op, values[i], {first, last}, read.layouts[i]));
    first = last;
  }
  return weights;
}

void check_count(const char* op, const char* what, const std::vector<Tensor>& list, std::size_t n) {
  STD_TORCH_CHECK(list.empty() || list.size() == n, op, ": ", what, " has ", list.size(),
                  " entries, wanted 0 or ", n);
}

void check_together(const char* op, const char* first, const std::vector<Tensor>& one,
                    const char* second, const std::vector<Tensor>& other) {
  STD_TORCH_CHECK(one.size() == other.size(), op, ": ", first, " has ", one.size(), " entries, ",
                  second, " has ", other.size(), "; they must come together");
}

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
