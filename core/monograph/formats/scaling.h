// What a rule decides for one block: the bytes of its scale, and how its elements are divided by
// it.
#pragma once

#include <cstdint>

#include "monograph/base/scaling.h"
#include "monograph/formats/format.h"

namespace monograph {

struct BlockScale {
  std::uint32_t stored;  // the low size_bytes(kind) bytes, little-endian
  Scaling scaling;
};

// The scale of a whole matrix in both directions: `encode` multiplies what is quantised, `decode`
// what is dequantised. Either may be the one that is stored.
struct TensorScales {
  float encode = 1.0f, decode = 1.0f;
};

struct RuleContext {
  ScaleRule rule = ScaleRule::kAbsmax;
  ScaleKind kind = ScaleKind::kFp32;
  TensorScales tensor;
};

}  // namespace monograph
