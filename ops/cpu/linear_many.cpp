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
  const char* const op = "linear_many";
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
  const LinearWeight weight = check_weight(op, values, scales, layout);
  const std::size_t rows = weight.packed.rows, cols = weight.packed.cols, count = b.size();
  const RowsArgument input = rows_of(op, "x", x);
  STD_TORCH_CHECK(input.matrix.cols == cols, op, ": x has ", input.matrix.cols,
                  " columns, the weight has ", cols);
  const RowsArgument low = rows_matching(op, "u", u, x, input);
  const Factors factors = factors_of(op, "b", b);
  std::vector<std::size_t> ranks;
  for (std::size_t i = 0; i < count; ++i) {
    const PackedView& factor = factors.weights[i].packed;
    STD_TORCH_CHECK(factor.rows == rows, op, ": b[", i, "] has ", factor.rows, " rows, wanted ",
                    rows);
    STD_TORCH_CHECK(factor.cols <= low.matrix.cols, op, ": u has ", low.matrix.cols,
                    " columns, wanted ", factor.cols, " or more for b[", i, "]");
    ranks.push_back(factor.cols);
  }
  check_a(op, a, cols, ranks);
  const Vectors biases = vectors_of(op, "bias", bias, count, rows, input.dtype);
  const Vectors gains = vectors_of(op, "gain", gain, count, rows, DType::kFloat32);
  for (std::size_t i = 0; i < count; ++i) {
    if (gains.data[i] == nullptr) continue;
    STD_TORCH_CHECK(!a.empty() && a[i].size(0) != 0, op, ": gain[", i, "] is given without a[", i,
                    "], wanted a low-rank part with a");
    STD_TORCH_CHECK(biases.data[i] == nullptr, op, ": gain[", i, "] and bias[", i,
                    "] are given, wanted the bias added to the result");
  }
  Ranges parts(starts_of(op, starts, count, input.matrix.rows), low.matrix, factors, ranks);
  for (std::size_t i = 0; i < count; ++i) {
    parts.ranges[i].bias = biases.data[i];
    parts.ranges[i].gain = static_cast<const float*>(gains.data[i]);
  }
  Tensor y = empty_rows(op, x, rows);
  if (rows == 0) return y;
  const LinearTerm shared = {input.matrix, weight};
  LinearProduct product = {
      {&shared, 1}, mutable_rows(y, input.matrix.rows, rows), input.matrix.rows};
  product.ranges = parts.ranges;
  linear_ranges(input.dtype, Pass::kForward, product, torch_parallel_for);
  return y;
}

Tensor linear_many_dx_cpu(const Tensor& dy, const Tensor& values, const std::vector<Tensor>& scales,
                          const std::vector<std::int64_t>& layout, const Tensor& starts,
                          const Tensor& du, const std::vector<Tensor>& a) {
  const char* const op = "linear_many_dx";
  check_device(op, DeviceType::CPU,
               {{"dy", dy},
                {"values", values},
                {"scales", scales},
                {"starts", starts},
                {"du", du},
                {"a", a}});
  const LinearWeight weight = check_weight(op, values, scales, layout);
  const std::size_t rows = weight.packed.rows, cols = weight.packed.cols;
  const RowsArgument input = rows_of(op, "dy", dy);
  STD_TORCH_CHECK(input.matrix.cols == rows, op, ": dy has ", input.matrix.cols,
                  " columns, the weight has ", rows, " rows");
  const RowsArgument low = rows_matching(op, "du", du, dy, input);
  const Factors factors = factors_of(op, "a", a);
  check_given(op, "starts", starts);
  // Without a low-rank part there are only rows, whosever they are.
  const std::size_t any =
      starts.dim() == 1 && starts.size(0) != 0 ? static_cast<std::size_t>(starts.size(0)) - 1 : 0;
  std::vector<std::size_t> ranks(a.empty() ? any : a.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    const PackedView& factor = factors.weights[i].packed;
    STD_TORCH_CHECK(factor.cols == cols, op, ": a[", i, "] has ", factor.cols, " columns, wanted ",
                    cols);
    STD_TORCH_CHECK(factor.rows <= low.matrix.cols, op, ": du has ", low.matrix.cols,
                    " columns, wanted ", factor.rows, " or more for a[", i, "]");
    ranks[i] = factor.rows;
  }
  const Ranges parts(starts_of(op, starts, ranks.size(), input.matrix.rows), low.matrix, factors,
                     ranks);
  Tensor dx = empty_rows(op, dy, cols);
  if (cols == 0) return dx;
  const LinearTerm shared = {input.matrix, weight};
  LinearProduct product = {
      {&shared, 1}, mutable_rows(dx, input.matrix.rows, cols), input.matrix.rows};
  product.ranges = parts.ranges;
  linear_ranges(input.dtype, Pass::kDx, product, torch_parallel_for);
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("linear_many", TORCH_BOX(&linear_many_cpu));
  m.impl("linear_many_dx", TORCH_BOX(&linear_many_dx_cpu));
}

}  // namespace monograph::ops
