#include "arguments/linear.h"

namespace monograph::ops {
namespace {

// The one stride at which all rows of [..., cols] lie, as those of a slice of the last dimension
// do; 0 if there is none.
std::int64_t stride_of_rows(const Tensor& tensor) {
  if (tensor.dim() < 2 || tensor.stride(tensor.dim() - 1) != 1) return 0;
  std::int64_t stride = 0, next = 0;
  for (std::int64_t i = tensor.dim() - 2; i >= 0; --i) {
    if (tensor.size(i) == 1) continue;
    if (tensor.stride(i) == 0) return 0;  // expanded
    if (stride != 0 && tensor.stride(i) != next) return 0;
    if (stride == 0) stride = tensor.stride(i);
    if (__builtin_mul_overflow(tensor.stride(i), tensor.size(i), &next)) return 0;
  }
  return stride != 0 ? stride : tensor.stride(tensor.dim() - 2);
}

}  // namespace

RowsArgument rows_of(const char* op, const char* what, const Tensor& tensor) {
  check_given(op, what, tensor);
  STD_TORCH_CHECK(tensor.dim() >= 1, op, ": ", what, " has no dimensions, wanted [..., cols]");
  RowsArgument argument = {tensor, {}, dtype_of(tensor.scalar_type(), op, what)};
  const std::int64_t cols = tensor.size(tensor.dim() - 1);
  const std::int64_t stride = stride_of_rows(tensor);
  const bool strided_rows = stride >= cols && stride > 0;
  if (!strided_rows && !tensor.is_contiguous()) argument.owner = torch::stable::contiguous(tensor);
  Matrix& matrix = argument.matrix;
  matrix.data = argument.owner.const_data_ptr();
  matrix.cols = static_cast<std::size_t>(cols);
  matrix.rows = 1;
  // Beside a dimension of 0 the others may be anything.
  for (std::int64_t i = 0; i + 1 < tensor.dim(); ++i)
    STD_TORCH_CHECK(!__builtin_mul_overflow(matrix.rows, static_cast<std::size_t>(tensor.size(i)),
                                            &matrix.rows),
                    op, ": ", what, " has 2^64 rows or more");
  matrix.stride = strided_rows ? static_cast<std::size_t>(stride) : matrix.cols;
  return argument;
}

RowsArgument rows_of(const char* op, const char* what, const Tensor& tensor, std::size_t rows,
                     DType dtype) {
  RowsArgument argument = rows_of(op, what, tensor);
  STD_TORCH_CHECK(argument.matrix.rows == rows, op, ": ", what, " has ", argument.matrix.rows,
                  " rows, wanted ", rows);
  STD_TORCH_CHECK(argument.dtype == dtype, op, ": ", what, " is ", name_of(argument.dtype),
                  ", wanted ", name_of(dtype), " as the activations");
  return argument;
}

RowsArgument rows_matching(const char* op, const char* what, const Tensor& tensor, const Tensor& x,
                           const RowsArgument& x_rows) {
  RowsArgument argument = rows_of(op, what, tensor, x_rows.matrix.rows, x_rows.dtype);
  bool same = tensor.dim() == x.dim();
  for (std::int64_t i = 0; same && i + 1 < x.dim(); ++i) same = tensor.size(i) == x.size(i);
  STD_TORCH_CHECK(same, op, ": ", what, " has ", tensor.dim(),
                  " dimensions, wanted the leading ones of the activations");
  return argument;
}

RowsArgument rows_like(const char* op, const char* what, const Tensor& tensor, const Tensor& x,
                       const RowsArgument& x_rows, DType dtype) {
  RowsArgument argument = rows_of(op, what, tensor, x_rows.matrix.rows, x_rows.matrix.cols, dtype);
  bool same = tensor.dim() == x.dim();
  for (std::int64_t i = 0; same && i < x.dim(); ++i) same = tensor.size(i) == x.size(i);
  STD_TORCH_CHECK(same, op, ": ", what, " has ", tensor.dim(),
                  " dimensions, wanted the shape of the activations");
  return argument;
}

RowsArgument vector_of(const char* op, const char* what, const Tensor& tensor, std::size_t size,
                       DType dtype) {
  check_given(op, what, tensor);
  STD_TORCH_CHECK(tensor.dim() == 1, op, ": ", what, " has ", tensor.dim(),
                  " dimensions, wanted one");
  return rows_of(op, what, tensor, 1, size, dtype);
}

RowsArgument rows_of(const char* op, const char* what, const Tensor& tensor, std::size_t rows,
                     std::size_t cols, DType dtype) {
  RowsArgument argument = rows_of(op, what, tensor, rows, dtype);
  STD_TORCH_CHECK(argument.matrix.cols == cols, op, ": ", what, " has ", argument.matrix.cols,
                  " columns, wanted ", cols);
  return argument;
}

LinearWeight check_weight(const char* op, const Tensor& values, const std::vector<Tensor>& scales,
                          const std::vector<std::int64_t>& layout) {
  STD_TORCH_CHECK(layout.size() == 4 || (!layout.empty() && layout[0] < 0), op, ": layout has ",
                  layout.size(), " entries, wanted [format, block, rows, cols]");
  return check_weight(op, values, scales, read_layout(op, layout));
}

LinearWeight check_weight(const char* op, const Tensor& values, const std::vector<Tensor>& scales,
                          const Layout& layout) {
  STD_TORCH_CHECK(layout.shape.size() == 2, op, ": the weight has ", layout.shape.size(),
                  " dimensions, wanted 2");
  note_weight(values, scales);
  if (layout.format != static_cast<std::int64_t>(Format::kPlain)) {
    const PackedGrids packed = check_packed(op, values, scales, layout).weight;
    STD_TORCH_CHECK(packed.count == 1, op, ": the weight has ", packed.count, " grids, wanted 1");
    return {packed.first, DType::kFloat32};
  }
  check_given(op, "values", values);
  STD_TORCH_CHECK(scales.empty(), op, ": a plain weight has ", scales.size(), " scales, wanted 0");
  STD_TORCH_CHECK(values.is_contiguous(), op, ": a plain weight must be contiguous");
  STD_TORCH_CHECK(layout.block == 0, op, ": a plain weight has block size ", layout.block,
                  ", wanted 0");
  STD_TORCH_CHECK(layout.origin == 0 && layout.grid_rows == 0, op,
                  ": a plain weight has an origin or grids, wanted neither");
  const std::int64_t rows = layout.shape[0], cols = layout.shape[1];
  std::int64_t elements = 0;
  STD_TORCH_CHECK(rows >= 0 && cols >= 0 && !__builtin_mul_overflow(rows, cols, &elements) &&
                      values.numel() == elements,
                  op, ": a plain weight has ", values.numel(), " elements, layout says ", rows,
                  " x ", cols);
  LinearWeight weight;
  weight.dtype = dtype_of(values.scalar_type(), op, "a plain weight");
  weight.packed.rows = static_cast<std::size_t>(rows);
  weight.packed.cols = static_cast<std::size_t>(cols);
  weight.packed.values = static_cast<const std::uint8_t*>(values.const_data_ptr());
  return weight;
}

LinearWeight plain_weight(const char* op, const char* what, const Tensor& tensor, std::size_t rows,
                          std::size_t cols, Tensor& owner) {
  check_given(op, what, tensor);
  STD_TORCH_CHECK(tensor.dim() == 2 && static_cast<std::size_t>(tensor.size(0)) == rows &&
                      static_cast<std::size_t>(tensor.size(1)) == cols,
                  op, ": ", what, " has the wrong shape, wanted [", rows, ", ", cols, "]");
  const DType dtype = dtype_of(tensor.scalar_type(), op, what);
  owner = tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
  LinearWeight weight;
  weight.dtype = dtype;
  weight.packed.rows = rows;
  weight.packed.cols = cols;
  weight.packed.values = static_cast<const std::uint8_t*>(owner.const_data_ptr());
  return weight;
}

void check_a(const char* op, const Tensor& a, std::size_t rank, std::size_t cols) {
  check_given(op, "a", a);
  dtype_of(a.scalar_type(), op, "a");
  STD_TORCH_CHECK(a.dim() == 2 && static_cast<std::size_t>(a.size(0)) == rank &&
                      static_cast<std::size_t>(a.size(1)) == cols,
                  op, ": a has the wrong shape, wanted [", rank, ", ", cols, "]");
}

LinearArguments check_linear(const char* op, const Tensor& x, const Tensor& values,
                             const std::vector<Tensor>& scales,
                             const std::vector<std::int64_t>& layout,
                             const std::optional<Tensor>& bias, const std::optional<Tensor>& u,
                             const std::optional<Tensor>& b, const std::optional<Tensor>& a) {
  LinearArguments found = {
      check_weight(op, values, scales, layout), rows_of(op, "x", x), {}, {}, {}, {}};
  const PackedView& weight = found.weight.packed;
  STD_TORCH_CHECK(found.x.matrix.cols == weight.cols, op, ": x has ", found.x.matrix.cols,
                  " columns, the weight has ", weight.cols);
  STD_TORCH_CHECK(u.has_value() == b.has_value(), op, ": u and b must come together");
  STD_TORCH_CHECK(u || !a, op, ": a is given without u and b, wanted all three");
  if (bias) found.bias = vector_of(op, "bias", *bias, weight.rows, found.x.dtype);
  if (!u) return found;
  found.u = rows_matching(op, "u", *u, x, found.x);
  const std::size_t rank = found.u->matrix.cols;
  found.low_rank = {found.u->matrix, plain_weight(op, "b", *b, weight.rows, rank, found.b_owner)};
  if (a) check_a(op, *a, rank, weight.cols);
  return found;
}

LinearDxArguments check_linear_dx(const char* op, const Tensor& dy, const Tensor& values,
                                  const std::vector<Tensor>& scales,
                                  const std::vector<std::int64_t>& layout,
                                  const std::optional<Tensor>& du, const std::optional<Tensor>& a) {
  const LinearWeight weight = check_weight(op, values, scales, layout);
  LinearDxArguments found = {{}, rows_of(op, "dy", dy), {}, {}};
  found.terms[0] = {found.dy.matrix, weight};
  STD_TORCH_CHECK(found.dy.matrix.cols == weight.packed.rows, op, ": dy has ", found.dy.matrix.cols,
                  " columns, the weight has ", weight.packed.rows, " rows");
  STD_TORCH_CHECK(du.has_value() == a.has_value(), op, ": du and a must come together");
  if (!du) return found;
  found.du = rows_matching(op, "du", *du, dy, found.dy);
  found.terms[1] = {found.du->matrix, plain_weight(op, "a", *a, found.du->matrix.cols,
                                                   weight.packed.cols, found.a_owner)};
  return found;
}

Tensor empty_rows(const char* op, const Tensor& x, std::size_t cols) {
  std::vector<std::int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = static_cast<std::int64_t>(cols);
  return empty(op, x, shape, x.scalar_type());
}

MutableMatrix mutable_rows(const Tensor& out, std::size_t rows, std::size_t cols) {
  return {out.mutable_data_ptr(), rows, cols, cols};
}

}  // namespace monograph::ops
