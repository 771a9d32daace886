// The variant list and the two operations in terms of the blocked product. No intrinsics here.
#include "monograph/kernels/linear/linear.h"

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

void linear_products_with(const LinearKernels& kernels, DType dtype,
                          std::span<const LinearProduct> products, ParallelFor parallel_for) {
  BlockedProducts(kernels, size_bytes(dtype), products).run(parallel_for);
}

void linear_with(const LinearKernels& kernels, DType dtype, const Matrix& x,
                 std::span<const LinearOutput> outputs, ParallelFor parallel_for) {
  std::vector<std::vector<LinearTerm>> terms;
  std::vector<LinearProduct> products;
  for (const LinearOutput& output : outputs) {
    terms.push_back({{x, output.weight}});
    terms.back().insert(terms.back().end(), output.low_rank.begin(), output.low_rank.end());
  }
  for (std::size_t i = 0; i < outputs.size(); ++i)
    products.push_back(
        {terms[i], outputs[i].y, x.rows, nullptr, nullptr, outputs[i].bias, outputs[i].gain});
  linear_products_with(kernels, dtype, products, parallel_for);
}

void linear_dx_with(const LinearKernels& kernels, DType dtype, std::span<const LinearTerm> terms,
                    const MutableMatrix& dx, ParallelFor parallel_for) {
  const LinearProduct product = {terms, dx, dx.rows};
  linear_products_with(kernels, dtype, {&product, 1}, parallel_for);
}

void linear(DType dtype, const Matrix& x, std::span<const LinearOutput> outputs,
            ParallelFor parallel_for) {
  linear_with(pick_linear(dtype, Pass::kForward), dtype, x, outputs, parallel_for);
}

void linear_dx(DType dtype, std::span<const LinearTerm> terms, const MutableMatrix& dx,
               ParallelFor parallel_for) {
  linear_dx_with(pick_linear(dtype, Pass::kDx), dtype, terms, dx, parallel_for);
}

void linear_products(DType dtype, Pass pass, std::span<const LinearProduct> products,
                     ParallelFor parallel_for) {
  for (const LinearProduct& product : products)
    if (pass == Pass::kDx && (product.bias != nullptr || product.gain != nullptr))
      throw Error("linear_products: a bias or a gain is given for dx, wanted none");
  linear_products_with(pick_linear(dtype, pass), dtype, products, parallel_for);
}

}  // namespace monograph
