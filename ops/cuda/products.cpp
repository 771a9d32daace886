#include "cuda/products.h"

#include <array>

namespace monograph::ops {

void product_into(const Tensor& out, const Tensor& x, const Tensor& w,
                  const std::optional<Tensor>& added) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  if (!added) {
    std::array<StableIValue, 3> stack = {from(x), from(transposed(w)), from(out)};
    STABLE_TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
    const Tensor same = to<Tensor>(stack[0]);
    return;
  }
  // addmm's factors are Scalars, which cannot cross the stable ABI. linear(x, w, bias) is addmm
  // with both factors 1, for a bias of two dimensions too (tests/python/ops/test_gpu_panels.py).
  std::array<StableIValue, 4> stack = {from(x), from(w), from(added), from(out)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::linear", "out", stack.data(), TORCH_ABI_VERSION));
  const Tensor same = to<Tensor>(stack[0]);
}

Tensor as_matrix(const Tensor& tensor) {
  const std::int64_t cols = tensor.size(tensor.dim() - 1);
  std::int64_t rows = 1;
  for (std::int64_t i = 0; i + 1 < tensor.dim(); ++i) rows *= tensor.size(i);
  return torch::stable::reshape(tensor, {rows, cols});
}

Tensor part(const Tensor& tensor, std::int64_t dim, std::size_t begin, std::size_t end) {
  Tensor whole = tensor;
  return torch::stable::narrow(whole, dim, static_cast<std::int64_t>(begin),
                               static_cast<std::int64_t>(end - begin));
}

Tensor transposed(const Tensor& matrix) { return torch::stable::transpose(matrix, 0, 1); }

Tensor times(const Tensor& a, const Tensor& b) {
  std::array<StableIValue, 2> stack = {torch::stable::detail::from(a),
                                       torch::stable::detail::from(b)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::mul", "Tensor", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor negated(const Tensor& tensor) {
  std::array<StableIValue, 1> stack = {torch::stable::detail::from(tensor)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::neg", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor as_bytes(const Tensor& vector) {
  std::array<StableIValue, 2> stack = {torch::stable::detail::from(vector),
                                       torch::stable::detail::from(ScalarType::Byte)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::view", "dtype", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor in_type(const Tensor& tensor, ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : torch::stable::to(tensor, dtype);
}

}  // namespace monograph::ops
