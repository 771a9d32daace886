// The arguments of linear, linear_dx and their shared forms, checked and turned into views.
#pragma once

#include <optional>
#include <string>

#include "arguments/packed.h"
#include "monograph/kernels/linear/linear.h"
#include "stable.h"

namespace monograph::ops {

// A tensor as a matrix of its last dimension, and whatever must live as long as the view.
struct RowsArgument {
  Tensor owner;
  Matrix matrix;
  DType dtype;
};

// [..., cols] as rows; a tensor whose rows do not lie at one stride is copied.
RowsArgument rows_of(const char* op, const char* what, const Tensor& tensor);
// The same, and it must have this many rows and this type; any number of columns, as a low-rank
// part has.
RowsArgument rows_of(const char* op, const char* what, const Tensor& tensor, std::size_t rows,
                     DType dtype);
// The same, and it must have this many columns.
RowsArgument rows_of(const char* op, const char* what, const Tensor& tensor, std::size_t rows,
                     std::size_t cols, DType dtype);

// The dimensions of `x` but for the last: u beside x, du beside dy.
RowsArgument rows_matching(const char* op, const char* what, const Tensor& tensor, const Tensor& x,
                           const RowsArgument& x_rows);
// Of the shape of `x`, and of this type.
RowsArgument rows_like(const char* op, const char* what, const Tensor& tensor, const Tensor& x,
                       const RowsArgument& x_rows, DType dtype);
// [size], as one row.
RowsArgument vector_of(const char* op, const char* what, const Tensor& tensor, std::size_t size,
                       DType dtype);

// A packed weight, or with layout [0, 0, rows, cols] a plain one whose elements are `values`. Two
// dimensions, one grid.
LinearWeight check_weight(const char* op, const Tensor& values, const std::vector<Tensor>& scales,
                          const Layout& layout);
LinearWeight check_weight(const char* op, const Tensor& values, const std::vector<Tensor>& scales,
                          const std::vector<std::int64_t>& layout);

// A plain matrix as a weight: the B or A of a low-rank term. Contiguous; `owner` keeps a copy
// alive.
LinearWeight plain_weight(const char* op, const char* what, const Tensor& tensor, std::size_t rows,
                          std::size_t cols, Tensor& owner);

// Checks what the gradient of a low-rank part takes and the forward does not: `a` [rank, cols].
void check_a(const char* op, const Tensor& a, std::size_t rank, std::size_t cols);

// What linear takes. `a` is only checked: it tells the autograd formula that u = x * a^T.
struct LinearArguments {
  LinearWeight weight;
  RowsArgument x;
  std::optional<RowsArgument> bias, u;
  Tensor b_owner;
  LinearTerm low_rank;  // u * b^T, where u is given
};
LinearArguments check_linear(const char* op, const Tensor& x, const Tensor& values,
                             const std::vector<Tensor>& scales,
                             const std::vector<std::int64_t>& layout,
                             const std::optional<Tensor>& bias, const std::optional<Tensor>& u,
                             const std::optional<Tensor>& b, const std::optional<Tensor>& a);

// What linear_dx takes.
struct LinearDxArguments {
  LinearTerm terms[2];  // dy * weight, and du * a where du is given
  RowsArgument dy;
  std::optional<RowsArgument> du;
  Tensor a_owner;
};
LinearDxArguments check_linear_dx(const char* op, const Tensor& dy, const Tensor& values,
                                  const std::vector<Tensor>& scales,
                                  const std::vector<std::int64_t>& layout,
                                  const std::optional<Tensor>& du, const std::optional<Tensor>& a);

// Like `x` with another last dimension.
Tensor empty_rows(const char* op, const Tensor& x, std::size_t cols);
MutableMatrix mutable_rows(const Tensor& out, std::size_t rows, std::size_t cols);

}  // namespace monograph::ops
