// Products by the library of the tensors' device, through torch's dispatcher: cuBLAS on a GPU, and
// no library of CUDA is linked.
#pragma once

#include <optional>

#include "stable.h"

namespace monograph::ops {

// out[M, N] = x[M, K] w[N, K]^T + added, where `added` is [N], [M, N] or none, and may be `out`
// itself. One rounding, to the type of `out`. Any strides.
void product_into(const Tensor& out, const Tensor& x, const Tensor& w,
                  const std::optional<Tensor>& added);

// The same elements as a matrix of the last dimension; a view where the strides allow it.
Tensor as_matrix(const Tensor& tensor);
// Part of one dimension, a view.
Tensor part(const Tensor& tensor, std::int64_t dim, std::size_t begin, std::size_t end);
Tensor transposed(const Tensor& matrix);
// Element by element, in the wider of the two types; as torch broadcasts.
Tensor times(const Tensor& a, const Tensor& b);
Tensor negated(const Tensor& tensor);
// The bytes of a contiguous vector, a view.
Tensor as_bytes(const Tensor& vector);
Tensor in_type(const Tensor& tensor, ScalarType dtype);

}  // namespace monograph::ops
