// The variant list and the two operations in terms of the blocked product. No intrinsics here.
#include "monograph/kernels/linear/linear.h"

#include <algorithm>
#include <string>

#include "monograph/base/error.h"
#include "monograph/kernels/keys.h"
#include "monograph/kernels/linear/blocking.h"
#include "targets.h"

namespace monograph {

// Defined once for each instruction set, in scalar.cpp, avx2.cpp, avx512.cpp, amx.cpp.
template <class V>
const LinearKernels* find_linear(DType dtype, Pass pass);

namespace {

std::vector<ByPass> every_pass() {
  std::vector<ByPass> keys;
  for (const ByDType& key : every_dtype())
    for (const Pass pass : {Pass::kForward, Pass::kDx}) keys.push_back({key.dtype, pass});
  return keys;
}

const LinearKernels& pick_linear(DType dtype, Pass pass) {
  if (const LinearKernels* kernels = pick(linear_variants(), dtype, pass)) return *kernels;
  throw Error(std::string("linear: no variant for ") + name_of(dtype));
}

}  // namespace

const std::vector<LinearVariant>& linear_variants() {
  static const auto rows = make_variants<const LinearKernels>(
      MatrixTargets{}, every_pass(),
      []<class V>(ByPass key) { return find_linear<V>(key.dtype, key.pass); });
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
