// Every torch include and alias of the operator layer, and the two bridges every op uses: torch's
// dtypes as ours, torch's thread pool as a ParallelFor. Stable ABI only
// (TORCH_TARGET_VERSION 2.11).
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "cpu/parallel.h"

namespace monograph::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// bfloat16, float16 or float32; anything else is an error that names `op` and `what`.
DType dtype_of(ScalarType type, const char* op, const char* what);
const char* name_of(ScalarType type);

// torch's own pool. A body must not throw: an exception would have to cross a C boundary.
inline constexpr struct TorchParallelFor {
  void operator()(std::size_t count, std::size_t grain, ParallelBody body) const;
} torch_parallel_for;

}  // namespace monograph::ops
