// One product by given kernels, as bytes: what tests of bits compare.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "monograph/kernels/linear/linear.h"

namespace monograph {

inline std::vector<std::uint8_t> product(const LinearKernels& kernels, DType dtype, Pass pass,
                                         const std::vector<std::uint8_t>& left, std::size_t m,
                                         const LinearWeight& weight) {
  const PackedView& w = weight.packed;
  const std::size_t in = pass == Pass::kForward ? w.cols : w.rows;
  const std::size_t out = pass == Pass::kForward ? w.rows : w.cols;
  std::vector<std::uint8_t> result(m * out * size_bytes(dtype));
  const Matrix matrix = {left.data(), m, in, in};
  if (pass == Pass::kForward) {
    const LinearOutput output = {weight, {}, nullptr, {result.data(), m, out, out}};
    linear_with(kernels, dtype, matrix, {&output, 1}, serial_for);
  } else {
    const LinearTerm term = {matrix, weight};
    linear_dx_with(kernels, dtype, {&term, 1}, {result.data(), m, out, out}, serial_for);
  }
  return result;
}

}  // namespace monograph
