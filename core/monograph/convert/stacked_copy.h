// Experts that are packed one by one, as one packed stack: the same bytes under other names.
#pragma once

#include <string>
#include <vector>

#include "monograph/convert/convert.h"

namespace monograph {

// One tensor of the stack: the bytes of others one behind the other, or text.
struct StackedPart {
  safetensors::TensorSpec spec;
  std::vector<safetensors::LocatedTensor> sources;
  std::string text;
};

// For Action::kCopy of a stack of packed matrices (composed_weight.h). Throws Error naming the
// stack and why it cannot hold them as they are:
//   quantised scales   each matrix has an offset of its own
//   fp8-block          gate and up must be whole blocks
//   nvfp4              gate and up of an expert must share their scale
//   other producers    a stack has the names of the producer that quantize writes for
//   input scales       they belong to activations, and a stack has none
std::vector<StackedPart> stacked_parts(const Conversion& conversion);

}  // namespace monograph
