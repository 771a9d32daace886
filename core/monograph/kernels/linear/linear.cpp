// The variant list and the two operations in terms of the blocked product. No intrinsics here.
#include "monograph/kernels/linear/linear.h"

#include <algorithm>
#include <string>

#include "monograph/base/error.h"
#include "monograph/kernels/keys.h"
#include "monograph/kernels/linear/blocking.h"
#include "product_targets.h"

namespace monograph {

// Defined once for each instruction set, in scalar.cpp, avx2.cpp, avx512.cpp, avx512_bf16.cpp,
// amx.cpp.
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
      ProductTargets{}, every_pass(),
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

namespace {

// The terms of `product` and of a range, from row `first` on.
void add_terms(std::span<const LinearTerm> terms, std::size_t first, std::size_t rows,
               std::size_t element_bytes, std::vector<LinearTerm>& out) {
  for (LinearTerm term : terms) {
    term.left.data =
        static_cast<const std::byte*>(term.left.data) + first * term.left.stride * element_bytes;
    term.left.rows = rows;
    out.push_back(term);
  }
}

// A product of no more ranges than one may have, each with its operands from its first row on.
struct SomeRanges {
  std::vector<LinearTerm> terms;
  std::vector<std::vector<LinearTerm>> own;
  std::vector<RowRange> ranges;
  LinearProduct product;

  SomeRanges(const LinearProduct& given, std::span<const RowRange> some, std::size_t bytes)
      : product(given) {
    const std::size_t first = some.front().first;
    product.rows = some.back().end() - first;
    product.out.rows = product.rows;
    product.out.data = static_cast<std::byte*>(given.out.data) + first * given.out.stride * bytes;
    add_terms(given.terms, first, product.rows, bytes, terms);
    if (some.size() == 1) {
      add_terms(some[0].terms, first, product.rows, bytes, terms);
      product.bias = some[0].bias;
      product.gain = some[0].gain;
    } else {
      for (const RowRange& range : some) {
        add_terms(range.terms, first, product.rows, bytes, own.emplace_back());
        ranges.push_back({range.first - first, range.rows, own.back(), range.bias, range.gain});
      }
    }
    product.terms = terms;
    product.ranges = ranges;
  }
};

}  // namespace

void linear_ranges_with(const LinearKernels& kernels, DType dtype, const LinearProduct& product,
                        ParallelFor parallel_for) {
  std::vector<RowRange> filled;
  for (const RowRange& range : product.ranges)
    if (range.rows != 0) filled.push_back(range);
  std::vector<SomeRanges> parts;
  std::vector<LinearProduct> products;
  parts.reserve(filled.size() / kMostRanges + 1);
  for (std::size_t i = 0; i < filled.size(); i += kMostRanges) {
    const std::size_t count = std::min(kMostRanges, filled.size() - i);
    parts.emplace_back(product, std::span(filled).subspan(i, count), size_bytes(dtype));
    products.push_back(parts.back().product);
  }
  linear_products_with(kernels, dtype, products, parallel_for);
}

void linear_ranges(DType dtype, Pass pass, const LinearProduct& product, ParallelFor parallel_for) {
  linear_ranges_with(pick_linear(dtype, pass), dtype, product, parallel_for);
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
