// monograph::gram_many: left^T right on the rows of each adapter.
#include "arguments/device.h"
#include "arguments/row_ranges.h"
#include "monograph/kernels/gram/gram.h"

namespace monograph::ops {
namespace {

void check_columns(const char* op, const char* what, const std::vector<std::int64_t>& counts,
                   const RowsArgument& rows) {
  for (std::size_t i = 0; i < counts.size(); ++i)
    STD_TORCH_CHECK(counts[i] >= 0 && static_cast<std::size_t>(counts[i]) <= rows.matrix.cols, op,
                    ": ", what, "_cols[", i, "] is ", counts[i], ", wanted 0 to ", rows.matrix.cols,
                    ", the columns of ", what);
}

std::vector<Tensor> gram_many_cpu(const Tensor& left, const Tensor& right, const Tensor& starts,
                                  const std::vector<std::int64_t>& left_cols,
                                  const std::vector<std::int64_t>& right_cols, ScalarType dtype) {
  const char* const op = "gram_many";
  check_device(op, DeviceType::CPU, {{"left", left}, {"right", right}, {"starts", starts}});
  const RowsArgument rows = rows_of(op, "left", left);
  const RowsArgument cols = rows_matching(op, "right", right, left, rows);
  const DType out_dtype = dtype_of(dtype, op, "the output");
  STD_TORCH_CHECK(left_cols.size() == right_cols.size(), op, ": left_cols has ", left_cols.size(),
                  " entries, right_cols has ", right_cols.size(), ", wanted as many");
  check_columns(op, "left", left_cols, rows);
  check_columns(op, "right", right_cols, cols);
  const std::vector<std::size_t> borders =
      starts_of(op, starts, left_cols.size(), rows.matrix.rows);
  std::vector<Tensor> results;
  for (std::size_t i = 0; i < left_cols.size(); ++i) {
    results.push_back(empty(op, left, {left_cols[i], right_cols[i]}, dtype));
    const std::size_t first = borders[i], count = borders[i + 1] - first;
    const auto part = [&](const RowsArgument& of, std::int64_t width) {
      return part_of(of.matrix, of.dtype, first, count, static_cast<std::size_t>(width));
    };
    gram({rows.dtype, part(rows, left_cols[i]), part(cols, right_cols[i]), nullptr, out_dtype,
          results.back().mutable_data_ptr()},
         torch_parallel_for);
  }
  return results;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) { m.impl("gram_many", TORCH_BOX(&gram_many_cpu)); }

}  // namespace monograph::ops
