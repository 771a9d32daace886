#include "arguments/linear_shared.h"

#include <algorithm>
#include <span>
#include <utility>

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

// None, or one for each of the n weights.
void check_count(const char* op, const char* what, const std::vector<Tensor>& list, std::size_t n) {
  STD_TORCH_CHECK(list.empty() || list.size() == n, op, ": ", what, " has ", list.size(),
                  " entries, wanted 0 or ", n);
}

void check_together(const char* op, const char* first, const std::vector<Tensor>& one,
                    const char* second, const std::vector<Tensor>& other) {
  STD_TORCH_CHECK(one.size() == other.size(), op, ": ", first, " has ", one.size(), " entries, ",
                  second, " has ", other.size(), "; they must come together");
}

}  // namespace

LinearSharedArguments check_linear_shared(
    const char* op, const Tensor& x, const std::vector<Tensor>& values,
    const std::vector<Tensor>& scales, const std::vector<std::int64_t>& layouts,
    const std::vector<Tensor>& bias, const std::vector<Tensor>& u, const std::vector<Tensor>& b,
    const std::vector<Tensor>& a) {
  std::vector<LinearWeight> weights = check_weights(op, values, scales, layouts);
  const std::size_t n = weights.size();
  check_count(op, "bias", bias, n);
  check_count(op, "u", u, n);
  check_together(op, "u", u, "b", b);
  check_count(op, "a", a, u.size());
  LinearSharedArguments found = {
      std::move(weights), rows_of(op, "x", x), {}, {}, std::vector<Tensor>(u.size()), {}};
  found.bias.reserve(bias.size());
  found.u.reserve(u.size());
  found.low_rank.reserve(u.size());
  for (std::size_t i = 0; i < n; ++i) {
    const PackedView& weight = found.weights[i].packed;
    STD_TORCH_CHECK(found.x.matrix.cols == weight.cols, op, ": x has ", found.x.matrix.cols,
                    " columns, weight ", i, " has ", weight.cols);
    if (!bias.empty())
      found.bias.push_back(vector_of(op, "bias", bias[i], weight.rows, found.x.dtype));
    if (u.empty()) continue;
    found.u.push_back(rows_matching(op, "u", u[i], x, found.x));
    const Matrix& low = found.u.back().matrix;
    found.low_rank.push_back(
        {low, plain_weight(op, "b", b[i], weight.rows, low.cols, found.b_owners[i])});
    if (!a.empty()) check_a(op, a[i], low.cols, weight.cols);
  }
  return found;
}

LinearSharedDxArguments check_linear_shared_dx(const char* op, const std::vector<Tensor>& dy,
                                               const std::vector<Tensor>& values,
                                               const std::vector<Tensor>& scales,
                                               const std::vector<std::int64_t>& layouts,
                                               const std::vector<Tensor>& du,
                                               const std::vector<Tensor>& a) {
  const std::vector<LinearWeight> weights = check_weights(op, values, scales, layouts);
  const std::size_t n = weights.size();
  STD_TORCH_CHECK(dy.size() == n, op, ": dy has ", dy.size(), " entries, wanted ", n);
  check_count(op, "du", du, n);
  check_together(op, "du", du, "a", a);
  const RowsArgument first = rows_of(op, "dy", dy[0]);
  const std::size_t cols = weights[0].packed.cols;
  LinearSharedDxArguments found = {{}, {}, std::vector<Tensor>(du.size()), {}};
  found.dy.reserve(n);
  found.du.reserve(du.size());
  found.terms.reserve(n + du.size());
  for (std::size_t i = 0; i < n; ++i) {
    STD_TORCH_CHECK(weights[i].packed.cols == cols, op, ": weight ", i, " has ",
                    weights[i].packed.cols, " columns, weight 0 has ", cols);
    found.dy.push_back(rows_matching(op, "dy", dy[i], dy[0], first));
    const Matrix& g = found.dy.back().matrix;
    STD_TORCH_CHECK(g.cols == weights[i].packed.rows, op, ": dy[", i, "] has ", g.cols,
                    " columns, weight ", i, " has ", weights[i].packed.rows, " rows");
    found.terms.push_back({g, weights[i]});
  }
  for (std::size_t i = 0; i < du.size(); ++i) {
    found.du.push_back(rows_matching(op, "du", du[i], dy[0], first));
    const Matrix& g = found.du.back().matrix;
    found.terms.push_back({g, plain_weight(op, "a", a[i], g.cols, cols, found.a_owners[i])});
  }
  return found;
}

}  // namespace monograph::ops
