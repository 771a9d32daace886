// The operands of the linear kernels: small non-owning views, checked by whoever made them.
#pragma once

#include <cstddef>

#include "monograph/base/dtype.h"
#include "monograph/formats/packed_view.h"

namespace monograph {

// Rows of `stride` elements, the last dimension contiguous. The element type is the call's.
struct Matrix {
  const void* data = nullptr;
  std::size_t rows = 0, cols = 0, stride = 0;
};
struct MutableMatrix {
  void* data = nullptr;
  std::size_t rows = 0, cols = 0, stride = 0;
};

// packed.format is kPlain for a weight that is not packed: packed.values then points to rows * cols
// contiguous elements of `dtype`.
struct LinearWeight {
  PackedView packed;
  DType dtype = DType::kFloat32;
};

struct LinearTerm {
  Matrix left;
  LinearWeight weight;
  // Row i of the product is row i of `left`, even where the product gathers the rows of others: the
  // low-rank part of rows that lie apart.
  bool in_order = false;
};

}  // namespace monograph
