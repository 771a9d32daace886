// monograph::low_rank_many and low_rank_many_dx: x times the factor of each adapter, on its own
// rows. What no adapter fills is -0.0, which an addition does not change.
#include "arguments/device.h"
#include "arguments/row_ranges.h"
#include "monograph/base/float_types.h"
#include "monograph/kernels/linear/linear.h"

namespace monograph::ops {
namespace {

constexpr std::int64_t kMostWidth = 1 << 20;

void fill_with_nothing(DType dtype, void* row, std::size_t count) {
  with_type(dtype, [&]<class T>() {
    T* out = static_cast<T*>(row);
    for (std::size_t i = 0; i < count; ++i) out[i] = from_float<T>(-0.0f);
  });
}

Tensor low_rank(const char* op, const char* what, Pass pass, const Tensor& x,
                const std::vector<Tensor>& list, const Tensor& starts, std::int64_t width) {
  check_device(op, DeviceType::CPU, {{what, x}, {"factors", list}, {"starts", starts}});
  const RowsArgument input = rows_of(op, what, x);
  const Factors factors = factors_of(op, "factors", list);
  STD_TORCH_CHECK(width >= 0 && width <= kMostWidth, op, ": width is ", width, ", wanted 0 to ",
                  kMostWidth);
  const auto columns = static_cast<std::size_t>(width);
  const bool forward = pass == Pass::kForward;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const PackedView& factor = factors.weights[i].packed;
    if (factor.rows == 0 || factor.cols == 0) continue;
    if (forward) {
      STD_TORCH_CHECK(factor.cols == input.matrix.cols, op, ": x has ", input.matrix.cols,
                      " columns, factors[", i, "] has ", factor.cols);
    } else {
      STD_TORCH_CHECK(factor.rows <= input.matrix.cols, op, ": du has ", input.matrix.cols,
                      " columns, factors[", i, "] has ", factor.rows,
                      " rows, wanted at most as many");
    }
    const std::size_t given = forward ? factor.rows : factor.cols;
    STD_TORCH_CHECK(given <= columns, op, ": width is ", width, ", factors[", i, "] gives ", given,
                    " columns");
  }
  const std::vector<std::size_t> borders = starts_of(op, starts, list.size(), input.matrix.rows);
  Tensor out = empty_rows(op, x, columns);
  const MutableMatrix all = mutable_rows(out, input.matrix.rows, columns);
  std::vector<LinearTerm> terms(list.size());
  std::vector<LinearProduct> products;
  const std::size_t element = size_bytes(input.dtype);
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::size_t first = borders[i], rows = borders[i + 1] - first;
    const PackedView& factor = factors.weights[i].packed;
    const std::size_t inner = forward ? factor.cols : factor.rows;
    const std::size_t outer = inner == 0 ? 0 : forward ? factor.rows : factor.cols;
    auto* data = static_cast<std::byte*>(all.data) + first * columns * element;
    for (std::size_t r = 0; r < rows; ++r)
      fill_with_nothing(input.dtype, data + (r * columns + outer) * element, columns - outer);
    if (rows == 0 || outer == 0) continue;
    terms[i] = {part_of(input.matrix, input.dtype, first, rows, inner), factors.weights[i]};
    products.push_back({{&terms[i], 1}, {data, rows, outer, columns}, rows});
  }
  if (!products.empty()) linear_products(input.dtype, pass, products, torch_parallel_for);
  return out;
}

Tensor low_rank_many_cpu(const Tensor& x, const std::vector<Tensor>& factors, const Tensor& starts,
                         std::int64_t width) {
  return low_rank("low_rank_many", "x", Pass::kForward, x, factors, starts, width);
}
Tensor low_rank_many_dx_cpu(const Tensor& du, const std::vector<Tensor>& factors,
                            const Tensor& starts, std::int64_t width) {
  return low_rank("low_rank_many_dx", "du", Pass::kDx, du, factors, starts, width);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("low_rank_many", TORCH_BOX(&low_rank_many_cpu));
  m.impl("low_rank_many_dx", TORCH_BOX(&low_rank_many_dx_cpu));
}

}  // namespace monograph::ops
