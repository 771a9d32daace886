// The borders of documents packed in one row, as every operator on documents takes them.
#pragma once

#include "stable.h"

namespace monograph::ops {

// `want` int32 numbers, contiguous. The numbers are data: whoever walks them checks them.
const std::int32_t* offsets_of(const char* op, const char* what, const Tensor& tensor,
                               std::int64_t want);

// Contiguous int32 [documents + 1].
struct DocumentsArgument {
  std::size_t count;
  const std::int32_t* offsets;
};
DocumentsArgument documents_of(const char* op, const char* what, const Tensor& tensor);

}  // namespace monograph::ops
