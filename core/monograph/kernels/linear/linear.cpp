// The variant list and the two operations in terms of the blocked product. No intrinsics here.
#include "monograph/kernels/linear/linear.h"

#include <algorithm>
#include <string>

#include "monograph/base/error.h"
#include "monograph/kernels/linear/blocking.h"
#include "targets.h"

namespace monograph {

// Defined once for each instruction set, in scalar.cpp, avx2.cpp, avx512.cpp, amx.cpp.
template <class V>
const LinearKernels* find_linear(DType dtype, Pass pass);

namespace {

template <class... Vs>
std::vector<LinearVariant> variants_of(TargetList<Vs...>) {
  return {{isa_of<Vs>, find_linear<Vs>}...};
}

const LinearKernels& pick_linear(DType dtype, Pass pass) {
  for (const LinearVariant& variant : linear_variants()) {
    if (variant.isa > best_isa()) continue;
    if (const LinearKernels* kernels = variant.find(dtype, pass)) return *kernels;
  }
  throw Error(std::string("linear: no variant for ") + name_of(dtype));
}

}  // namespace

// AVX-512's kernels serve this level: VDPBF16PS starts every second cycle on Sapphire Rapids and so
// does half the products of two fp32 FMAs a cycle; it also flushes subnormals.
template <>
const LinearKernels* find_linear<simd::Avx512Bf16>(DType, Pass) {
  return nullptr;
}

const std::vector<LinearVariant>& linear_variants() {
  static const std::vector<LinearVariant> rows = variants_of(MatrixTargets{});
  return rows;
}

void linear_with(const LinearKernels& any, DType dtype, const Matrix& x,
                 std::span<const LinearOutput> outputs, ParallelFor parallel_for) {
  const LinearKernels& kernels = any.for_rows(x.rows);
  const Blocking blocking = choose_blocking(kernels, x.rows, cache_bytes());
  for (std::size_t row = 0; row < x.rows; row += blocking.rows) {
    std::size_t packed = 0;
    for (const LinearOutput& output : outputs) {
      std::vector<LinearTerm> terms = {{x, output.weight}};
      terms.insert(terms.end(), output.low_rank.begin(), output.low_rank.end());
      const BlockedProduct product(kernels, blocking, size_bytes(dtype), terms, output.gain,
                                   output.bias, output.y);
      product.run(row, std::min(blocking.rows, x.rows - row), packed, parallel_for);
      packed = product.reusable_chunks();
    }
  }
}

void linear_dx_with(const LinearKernels& any, DType dtype, std::span<const LinearTerm> terms,
                    const MutableMatrix& dx, ParallelFor parallel_for) {
  const LinearKernels& kernels = any.for_rows(dx.rows);
  const Blocking blocking = choose_blocking(kernels, dx.rows, cache_bytes());
  const BlockedProduct product(kernels, blocking, size_bytes(dtype), terms, nullptr, nullptr, dx);
  for (std::size_t row = 0; row < dx.rows; row += blocking.rows)
    product.run(row, std::min(blocking.rows, dx.rows - row), 0, parallel_for);
}

void linear(DType dtype, const Matrix& x, std::span<const LinearOutput> outputs,
            ParallelFor parallel_for) {
  linear_with(pick_linear(dtype, Pass::kForward), dtype, x, outputs, parallel_for);
}

void linear_dx(DType dtype, std::span<const LinearTerm> terms, const MutableMatrix& dx,
               ParallelFor parallel_for) {
  linear_dx_with(pick_linear(dtype, Pass::kDx), dtype, terms, dx, parallel_for);
}

}  // namespace monograph
