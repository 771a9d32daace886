#include "arguments/documents.h"

namespace monograph::ops {

const std::int32_t* offsets_of(const char* op, const char* what, const Tensor& tensor,
                               std::int64_t want) {
  check_given(op, what, tensor);
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Int, op, ": ", what, " has dtype ",
                  name_of(tensor.scalar_type()), ", wanted int32");
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.is_contiguous(), op, ": ", what,
                  " must be contiguous with one dimension");
  STD_TORCH_CHECK(tensor.numel() == want, op, ": ", what, " has ", tensor.numel(),
                  " entries, wanted ", want);
  return static_cast<const std::int32_t*>(tensor.const_data_ptr());
}

DocumentsArgument documents_of(const char* op, const char* what, const Tensor& tensor) {
  check_given(op, what, tensor);
  STD_TORCH_CHECK(tensor.numel() >= 1, op, ": ", what, " is empty, wanted at least one offset");
  const std::int32_t* offsets = offsets_of(op, what, tensor, tensor.numel());
  return {static_cast<std::size_t>(tensor.numel() - 1), offsets};
}

}  // namespace monograph::ops
