// monograph::linear_many and linear_many_dx: many LoRA adapters beside one packed weight, each on
// its own rows.
#include "arguments/device.h"
#include "arguments/row_ranges.h"
#include "monograph/kernels/linear/linear.h"

namespace monograph::ops {
namespace {

// The low-rank term of each adapter that has one: its columns of `left` are the first.
class Ranges {
 public:
  Ranges(const std::vector<std::size_t>& starts, const Matrix& left, const Factors& factors,
         const std::vector<std::size_t>& ranks)
      : terms_(ranks.size()) {
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      terms_[i] = {{left.data, left.rows, ranks[i], left.stride}, {}};
      if (ranks[i] != 0) terms_[i].weight = factors.weights[i];
      ranges.push_back({starts[i],
                        starts[i + 1] - starts[i],
                        {&terms_[i], ranks[i] != 0 ? std::size_t{1} : std::size_t{0}}});
    }
  }
  std::vector<RowRange> ranges;

 private:
  std::vector<LinearTerm> terms_;
};

// How the operands of a pass are called: `x` meets W, `u` the factors of the adapters.
struct Names {
  const char *op, *x, *u, *factors;
  Pass pass;
};
constexpr Names kForward = {"linear_many", "x", "u", "b", Pass::kForward};
constexpr Names kDx = {"linear_many_dx", "dy", "du", "a", Pass::kDx};

// What both passes are given, and the ranks of the adapters.
struct Operands {
  LinearWeight weight;
  RowsArgument input, low;
  Factors factors;
  std::vector<std::size_t> ranks;
  std::size_t columns;  // of the result
};

Operands operands_of(const Names& of, const Tensor& x, const Tensor& values,
                     const std::vector<Tensor>& scales, const std::vector<std::int64_t>& layout,
                     const Tensor& u, const std::vector<Tensor>& factors) {
  const char* const op = of.op;
  const bool forward = of.pass == Pass::kForward;
  const LinearWeight weight = check_weight(op, values, scales, layout);
  const std::size_t inner = forward ? weight.packed.cols : weight.packed.rows;
  const std::size_t outer = forward ? weight.packed.rows : weight.packed.cols;
  const RowsArgument input = rows_of(op, of.x, x);
  STD_TORCH_CHECK(input.matrix.cols == inner, op, ": ", of.x, " has ", input.matrix.cols,
                  " columns, the weight has ", inner, forward ? "" : " rows");
  Operands found = {weight, input, rows_matching(op, of.u, u, x, input), {}, {}, outer};
  found.factors = factors_of(op, of.factors, factors);
  for (std::size_t i = 0; i < factors.size(); ++i) {
    const PackedView& factor = found.factors.weights[i].packed;
    const std::size_t given = forward ? factor.rows : factor.cols;
    const std::size_t rank = forward ? factor.cols : factor.rows;
    STD_TORCH_CHECK(given == outer, op, ": ", of.factors, "[", i, "] has ", given,
                    forward ? " rows" : " columns", ", wanted ", outer);
    STD_TORCH_CHECK(rank <= found.low.matrix.cols, op, ": ", of.u, " has ", found.low.matrix.cols,
                    " columns, wanted ", rank, " or more for ", of.factors, "[", i, "]");
    found.ranks.push_back(rank);
  }
  return found;
}

Tensor product_of(const Names& of, const Operands& given, const Ranges& parts, const Tensor& x) {
  Tensor out = empty_rows(of.op, x, given.columns);
  if (given.columns == 0) return out;
  const Matrix& input = given.input.matrix;
  const LinearTerm shared = {input, given.weight};
  LinearProduct product = {{&shared, 1}, mutable_rows(out, input.rows, given.columns), input.rows};
  product.ranges = parts.ranges;
  linear_ranges(given.input.dtype, of.pass, product, torch_parallel_for);
  return out;
}

// `a` is only checked, but for saying which adapters may have a gain: it tells the autograd
// formula that u = x * a^T.
void check_a(const char* op, const std::vector<Tensor>& a, std::size_t cols,
             const std::vector<std::size_t>& ranks) {
  check_entries(op, "a", a, ranks.size());
  const Factors found = factors_of(op, "a", a);
  for (std::size_t i = 0; i < a.size(); ++i) {
    const PackedView& factor = found.weights[i].packed;
    STD_TORCH_CHECK(factor.cols == cols, op, ": a[", i, "] has ", factor.cols, " columns, wanted ",
                    cols);
    STD_TORCH_CHECK(factor.rows == 0 || factor.rows == ranks[i], op, ": a[", i, "] has ",
                    factor.rows, " rows, wanted ", ranks[i], " as the columns of b[", i, "], or 0");
  }
}

Tensor linear_many_cpu(const Tensor& x, const Tensor& values, const std::vector<Tensor>& scales,
                       const std::vector<std::int64_t>& layout, const Tensor& starts,
                       const Tensor& u, const std::vector<Tensor>& b, const std::vector<Tensor>& a,
                       const std::vector<Tensor>& bias, const std::vector<Tensor>& gain) {
  const char* const op = kForward.op;
  check_device(op, DeviceType::CPU,
               {{"x", x},
                {"values", values},
                {"scales", scales},
                {"starts", starts},
                {"u", u},
                {"b", b},
                {"a", a},
                {"bias", bias},
                {"gain", gain}});
  const Operands given = operands_of(kForward, x, values, scales, layout, u, b);
  const std::size_t rows = given.columns, count = b.size();
  check_a(op, a, given.weight.packed.cols, given.ranks);
  const Vectors biases = vectors_of(op, "bias", bias, count, rows, given.input.dtype);
  const Vectors gains = vectors_of(op, "gain", gain, count, rows, DType::kFloat32);
  for (std::size_t i = 0; i < count; ++i) {
    if (gains.data[i] == nullptr) continue;
    STD_TORCH_CHECK(!a.empty() && a[i].size(0) != 0, op, ": gain[", i, "] is given without a[", i,
                    "], wanted a low-rank part with a");
    STD_TORCH_CHECK(biases.data[i] == nullptr, op, ": gain[", i, "] and bias[", i,
                    "] are given, wanted the bias added to the result");
  }
  Ranges parts(starts_of(op, starts, count, given.input.matrix.rows), given.low.matrix,
               given.factors, given.ranks);
  for (std::size_t i = 0; i < count; ++i) {
    parts.ranges[i].bias = biases.data[i];
    parts.ranges[i].gain = static_cast<const float*>(gains.data[i]);
  }
  return product_of(kForward, given, parts, x);
}

Tensor linear_many_dx_cpu(const Tensor& dy, const Tensor& values, const std::vector<Tensor>& scales,
                          const std::vector<std::int64_t>& layout, const Tensor& starts,
                          const Tensor& du, const std::vector<Tensor>& a) {
  const char* const op = kDx.op;
  check_device(op, DeviceType::CPU,
               {{"dy", dy},
                {"values", values},
                {"scales", scales},
                {"starts", starts},
                {"du", du},
                {"a", a}});
  Operands given = operands_of(kDx, dy, values, scales, layout, du, a);
  check_given(op, "starts", starts);
  // Without a low-rank part there are only rows, whosever they are.
  if (a.empty() && starts.dim() == 1 && starts.size(0) != 0)
    given.ranks.resize(static_cast<std::size_t>(starts.size(0)) - 1);
  const Ranges parts(starts_of(op, starts, given.ranks.size(), given.input.matrix.rows),
                     given.low.matrix, given.factors, given.ranks);
  return product_of(kDx, given, parts, dy);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("linear_many", TORCH_BOX(&linear_many_cpu));
  m.impl("linear_many_dx", TORCH_BOX(&linear_many_dx_cpu));
}

}  // namespace monograph::ops
