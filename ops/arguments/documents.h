// The borders of documents packed in one row, as every operator on documents takes them.
#pragma once

#include "stable.h"

namespace monograph::ops {

// `want` int32 numbers, contiguous. The numbers are data: whoever walks them checks them.
const std::int32_t* offsets_of(const char* op, const char* what, const Tensor& tensor,
                               std::int64_t want);

}  // namespace monograph::ops
