// A packed weight as it crosses the operator boundary, checked once.
//
// Schema part shared by all formats:  Tensor values, Tensor[] scales, SymInt[] layout
//   values  uint8, packed elements, contiguous, any shape
//   scales  uint8 tensors: [absmax] or, double-quantised, [absmax, groups, map, offset]
//           (fp32 entries travel as their four bytes)
//   layout  [format, block, *shape]; the format is the number of monograph::Format
#pragma once

#include "formats/packed_view.h"
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

}  // namespace monograph::ops
