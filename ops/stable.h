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
#include <sstream>
#include <stdexcept>
#include <vector>

#include "monograph/base/dtype.h"
#include "monograph/cpu/parallel.h"

namespace monograph::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// bfloat16, float16 or float32; anything else is an error that names `op` and `what`.
DType dtype_of(ScalarType type, const char* op, const char* what);
const char* name_of(ScalarType type);

// An error of these words. STD_TORCH_CHECK(false, ...) does the same, but an unoptimised build
// believes that it returns.
template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

// torch hands over None for a `Tensor` as an undefined one.
void check_given(const char* op, const char* what, const Tensor& tensor);

// What the kernels compute with. A number that float32 rounds to infinity or to 0 would mean
// another thing there and is an error.
float float32_of(const char* op, const char* what, double number);

// A new tensor on the device of `like`. A shape of too many elements, or more than the allocator
// gives, is an error that names `op` and the shape.
Tensor empty(const char* op, const Tensor& like, const std::vector<std::int64_t>& shape,
             ScalarType dtype);

// The bytes of two contiguous tensors overlap.
bool overlap(const Tensor& a, const Tensor& b);

// torch's own pool. What a body throws is carried past the C boundary and thrown here.
inline constexpr struct TorchParallelFor {
  void operator()(std::size_t count, std::size_t grain, ParallelBody body) const;
} torch_parallel_for;

}  // namespace monograph::ops
