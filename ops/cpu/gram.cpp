// monograph::gram: left^T right, a chain of fp32 over the rows, from a sum of those before or from
// 0.
#include "monograph/kernels/gram/gram.h"

#include <optional>

#include "arguments/device.h"
#include "arguments/linear.h"

namespace monograph::ops {
namespace {

Tensor gram_cpu(const Tensor& left, const Tensor& right, const std::optional<Tensor>& sum,
                ScalarType dtype) {
  const char* const op = "gram";
  check_device(op, DeviceType::CPU, {{"left", left}, {"right", right}, {"sum", sum}});
  const RowsArgument rows = rows_of(op, "left", left);
  const RowsArgument cols = rows_matching(op, "right", right, left, rows);
  const DType out_dtype = dtype_of(dtype, op, "the output");
  const auto height = static_cast<std::int64_t>(rows.matrix.cols);
  const auto width = static_cast<std::int64_t>(cols.matrix.cols);
  GramProblem problem = {rows.dtype, rows.matrix, cols.matrix, nullptr, out_dtype, nullptr};
  std::optional<Tensor> before;
  if (sum) {
    check_given(op, "sum", *sum);
    STD_TORCH_CHECK(sum->scalar_type() == ScalarType::Float, op, ": sum is ",
                    name_of(sum->scalar_type()), ", wanted float32");
    STD_TORCH_CHECK(sum->dim() == 2 && sum->size(0) == height && sum->size(1) == width, op,
                    ": sum has ", sum->dim(), " dimensions and ", sum->numel(),
                    " elements, wanted [", height, ", ", width, "]");
    before = sum->is_contiguous() ? *sum : torch::stable::contiguous(*sum);
    problem.sum = static_cast<const float*>(before->const_data_ptr());
  }
  Tensor out = empty(op, left, {height, width}, dtype);
  problem.out = out.mutable_data_ptr();
  gram(problem, torch_parallel_for);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) { m.impl("gram", TORCH_BOX(&gram_cpu)); }

}  // namespace monograph::ops
