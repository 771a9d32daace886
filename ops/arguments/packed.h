// A packed weight as it crosses the operator boundary, checked once.
//
// Schema part shared by all formats:  Tensor values, Tensor[] scales, SymInt[] layout
//   values  uint8, packed elements, contiguous, any shape
//   scales  uint8 tensors, numbers as their bytes: [absmax] or, double-quantised, [absmax, groups,
//           map, offset]; [blocks] or, with a scale for the whole matrix, [blocks, tensor]
//   layout  [format, block, *shape]; the format is the number of monograph::Format
#pragma once

#include <string>

#include "monograph/formats/packed_view.h"
#include "stable.h"

namespace monograph::ops {

struct PackedArgument {
  PackedView view;
  std::vector<std::int64_t> shape;  // logical: (rows, cols) or (experts, rows, cols) ...
};

// Throws with the name of `op`, the thing, the value found and the value wanted. The tensors must
// outlive the view.
PackedArgument check_packed(const char* op, const Tensor& values, const std::vector<Tensor>& scales,
                            const std::vector<std::int64_t>& layout);

const FormatInfo& check_format(const char* op, const char* what, std::int64_t number);

}  // namespace monograph::ops
