#include "monograph/kernels/experts/projection.h"

#include <algorithm>

#include "monograph/base/float_types.h"
#include "monograph/cpu/dynamic_schedule.h"
#include "monograph/cpu/scratch.h"
#include "monograph/kernels/experts/factors.h"
#include "monograph/kernels/linear/linear.h"

namespace monograph {
namespace {

// The left operand of a bias that is a term: the pass that multiplies by columns adds no other.
constexpr Bf16 kBf16One = {0x3f80};
constexpr Fp16 kFp16One = {0x3c00};
constexpr float kFloatOne = 1;

const void* one_of(DType dtype) {
  if (dtype == DType::kBFloat16) return &kBf16One;
  return dtype == DType::kFloat16 ? static_cast<const void*>(&kFp16One) : &kFloatOne;
}

}  // namespace

ExpertsProduct::ExpertsProduct(const ExpertsProblem& problem, const ExpertsProjection& projection,
                               const Routing& routing, ParallelFor parallel_for)
    : problem_(problem),
      projection_(projection),
      routing_(routing),
      parallel_for_(parallel_for),
      element_(size_bytes(problem.dtype)) {
  if (projection.bias == nullptr || projection.bias_dtype == problem.dtype) return;
  const std::size_t count = problem.experts * projection.out;
  bias_ = Buffer(count * element_);
  convert(projection.bias, projection.bias_dtype, count, bias_.data(), problem.dtype);
}

const std::byte* ExpertsProduct::bias(std::size_t i) const {
  const auto* all = bias_ ? bias_.data() : static_cast<const std::byte*>(projection_.bias);
  return all + routing_.active[i] * projection_.out * element_;
}

std::vector<ExpertsProduct::Part> ExpertsProduct::parts(std::size_t i, std::size_t most) const {
  std::vector<Part> found;
  const auto add = [&](const PackedGrids& stack, std::size_t begin, std::size_t rows) {
    const std::size_t each = std::min({rows, most, stack.first.rows});
    for (std::size_t first = 0; first < rows; first += each)
      found.push_back(
          {begin + first,
           {slice_rows(stack, routing_.active[i] * rows + first, each), projection_.dtype}});
  };
  const std::size_t rows = problem_.transposed ? projection_.in : projection_.out;
  if (projection_.up_half) {
    add(projection_.weight, 0, rows / 2);
    add(*projection_.up_half, rows / 2, rows / 2);
  } else {
    add(projection_.weight, 0, rows);
  }
  return found;
}

LinearWeight ExpertsProduct::factor(const Buffer& of_active, std::size_t i, std::size_t rows,
                                    std::size_t cols, std::size_t first_row) const {
  LinearWeight weight;
  weight.dtype = problem_.dtype;
  weight.packed.rows = rows - first_row;
  weight.packed.cols = cols;
  weight.packed.values = reinterpret_cast<const std::uint8_t*>(of_active.data()) +
                         (i * factor_stride(rows * cols) + first_row * cols) * element_;
  return weight;
}

Buffer ExpertsProduct::gather_b(bool rank_first) const {
  const std::size_t size = projection_.out * projection_.rank;
  Buffer factors(routing_.active.size() * factor_stride(size) * element_);
  gather_factors({projection_.b, projection_.b_dtype, problem_.experts, projection_.rank,
                  projection_.out, routing_.active, problem_.dtype, rank_first, factors.data()},
                 parallel_for_);
  return factors;
}

Buffer ExpertsProduct::gather_a(bool transposed) const {
  const std::size_t rank = projection_.rank, in = projection_.in, size = rank * in;
  Buffer factors(routing_.active.size() * factor_stride(size) * element_);
  parallel_for_(routing_.active.size(), 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const auto* a = static_cast<const std::byte*>(projection_.a) +
                      routing_.active[i] * size * size_bytes(projection_.a_dtype);
      std::byte* const out = factors.data() + i * factor_stride(size) * element_;
      if (transposed)
        transpose(a, projection_.a_dtype, rank, in, out, problem_.dtype);
      else
        convert(a, projection_.a_dtype, size, out, problem_.dtype);
    }
  });
  return factors;
}

const Buffer& ExpertsProduct::a_rows() const {
  if (!a_rows_) a_rows_ = gather_a(/*transposed=*/false);
  return a_rows_;
}

LinearTerm ExpertsProduct::rows_of(const ExpertsRows& rows, std::size_t i) const {
  LinearTerm term = {rows.matrix, {}};
  if (rows.by_token) return term;
  term.left.data = static_cast<const std::byte*>(rows.matrix.data) +
                   routing_.first(i) * rows.matrix.stride * element_;
  term.left.rows = routing_.rows(i);
  return term;
}

LinearTerm ExpertsProduct::places_of(const Buffer& u, std::size_t i) const {
  const std::size_t rank = projection_.rank;
  LinearTerm term = rows_of({{u.data(), routing_.kept(), rank, rank}, false}, i);
  term.in_order = true;
  return term;
}

Buffer ExpertsProduct::low_rank_product(const ExpertsRows& rows,
                                        const std::vector<LinearWeight>& factors) const {
  const std::size_t rank = projection_.rank;
  Buffer u(routing_.kept() * rank * element_);
  const std::vector<float> gain(rank, projection_.scale);
  std::vector<LinearTerm> terms(factors.size());
  std::vector<LinearProduct> products(factors.size());
  for (std::size_t i = 0; i < factors.size(); ++i) {
    terms[i] = rows_of(rows, i);
    terms[i].weight = factors[i];
    LinearProduct& product = products[i];
    product.terms = {&terms[i], 1};
    product.rows = routing_.rows(i);
    product.out = {u.data() + routing_.first(i) * rank * element_, product.rows, rank, rank};
    product.gain = gain.data();
    if (rows.by_token) product.left_rows = routing_.tokens.data() + routing_.first(i);
  }
  linear_products(problem_.dtype, Pass::kForward, products, parallel_for_);
  return u;
}

Buffer ExpertsProduct::narrow_products(const ExpertsTiles& tiles, const ExpertsRows& rows,
                                       NarrowFactor kind, const void* factors,
                                       std::size_t stride) const {
  const std::size_t rank = projection_.rank;
  Buffer u(routing_.kept() * rank * element_);
  dynamic_schedule(routing_.active.size(), parallel_for_, [&](std::size_t i) {
    const Scratch scratch(ScratchUse::kLocal, narrow_scratch(rows.matrix.cols));
    // PEFT's own have a place for each expert.
    const std::size_t place = factors == projection_.a ? routing_.active[i] : i;
    tiles.enter();
    tiles.narrow({rows_of(rows, i).left,
                  rows.by_token ? routing_.tokens.data() + routing_.first(i) : nullptr,
                  routing_.rows(i), static_cast<const std::byte*>(factors) + place * stride, kind,
                  rank, projection_.scale, u.data() + routing_.first(i) * rank * element_,
                  scratch.data()});
    tiles.leave();
  });
  return u;
}

Buffer ExpertsProduct::low_rank(const ExpertsRows& x) const {
  if (!has_low_rank()) return {};
  if (const ExpertsTiles* tiles = pick_experts_tiles(problem_.dtype)) {
    const std::size_t size = projection_.rank * projection_.in;
    if (!a_rows_ && projection_.a_dtype == DType::kFloat32)
      return narrow_products(*tiles, x, NarrowFactor::kFloats, projection_.a, size * sizeof(float));
    return narrow_products(*tiles, x, NarrowFactor::kRows, a_rows().data(),
                           factor_stride(size) * element_);
  }
  std::vector<LinearWeight> factors;
  for (std::size_t i = 0; i < routing_.active.size(); ++i)
    factors.push_back(factor(a_rows(), i, projection_.rank, projection_.in));
  return low_rank_product(x, factors);
}

Buffer ExpertsProduct::low_rank_back(const ExpertsRows& dout) const {
  if (!has_low_rank()) return {};
  if (const ExpertsTiles* tiles = pick_experts_tiles(problem_.dtype))
    return narrow_products(*tiles, dout, NarrowFactor::kColumns,
                           gather_b(/*rank_first=*/false).data(),
                           factor_stride(projection_.rank * projection_.out) * element_);
  const Buffer b = gather_b(/*rank_first=*/true);
  std::vector<LinearWeight> factors;
  for (std::size_t i = 0; i < routing_.active.size(); ++i)
    factors.push_back(factor(b, i, projection_.rank, projection_.out));
  return low_rank_product(dout, factors);
}

void ExpertsProduct::forward(const ExpertsRows& x, const Buffer& u, std::size_t first_col,
                             const MutableMatrix& out) const {
  const bool transposed = problem_.transposed;
  const std::size_t rank = projection_.rank, width = projection_.out;
  const Buffer b = u ? gather_b(/*rank_first=*/transposed) : Buffer();
  std::vector<std::vector<LinearTerm>> terms;
  std::vector<LinearProduct> products;
  for (std::size_t i = 0; i < routing_.active.size(); ++i) {
    for (const Part& part : parts(i, transposed ? projection_.in : width)) {
      // The part's share of the columns that are wanted.
      const std::size_t part_end = transposed ? width : part.first + part.weight.packed.rows;
      const std::size_t begin = std::max(first_col, transposed ? 0 : part.first);
      const std::size_t end = std::min(first_col + out.cols, part_end);
      if (begin >= end) continue;
      const std::size_t part_first = transposed ? 0 : part.first;
      std::vector<LinearTerm>& sum = terms.emplace_back();
      sum.push_back(rows_of(x, i));
      sum.back().weight = part.weight;
      if (u) {
        sum.push_back(places_of(u, i));
        sum.back().weight =
            transposed ? factor(b, i, rank, width) : factor(b, i, width, rank, part_first);
      }
      LinearProduct product;
      product.rows = routing_.rows(i);
      product.out = {static_cast<std::byte*>(out.data) +
                         (routing_.first(i) * out.stride + begin - first_col) * element_,
                     product.rows, end - begin, out.stride};
      product.first_col = begin - part_first;
      if (x.by_token) product.left_rows = routing_.tokens.data() + routing_.first(i);
      if (projection_.bias != nullptr && !transposed) product.bias = bias(i) + begin * element_;
      if (projection_.bias != nullptr && transposed) {
        LinearTerm term = {{one_of(problem_.dtype), product.rows, 1, 0}, {}, true};
        term.weight.dtype = problem_.dtype;
        term.weight.packed.rows = 1;
        term.weight.packed.cols = width;
        term.weight.packed.values = reinterpret_cast<const std::uint8_t*>(bias(i));
        sum.push_back(term);
      }
      products.push_back(product);
    }
  }
  for (std::size_t i = 0; i < products.size(); ++i) products[i].terms = terms[i];
  linear_products(problem_.dtype, transposed ? Pass::kDx : Pass::kForward, products, parallel_for_);
}

void ExpertsProduct::back(const ExpertsRows& dout, const Buffer& du, std::size_t first_col,
                          const MutableMatrix& out) const {
  const bool transposed = problem_.transposed;
  const std::size_t rank = projection_.rank;
  // Gate and up may have been quantised apart. The sum is cut between them for every weight, so
  // that all that hold the same values give the same bits.
  const bool halves = &projection_ == &problem_.up && is_gated(problem_.activation);
  const std::size_t reduction = halves ? projection_.out / 2 : projection_.out;
  const Buffer a = du && transposed ? gather_a(/*transposed=*/true) : Buffer();
  std::vector<std::vector<LinearTerm>> terms(routing_.active.size());
  std::vector<LinearProduct> products(routing_.active.size());
  for (std::size_t i = 0; i < routing_.active.size(); ++i) {
    for (const Part& part : parts(i, transposed ? projection_.in : reduction)) {
      LinearTerm term = rows_of(dout, i);
      term.weight = part.weight;
      if (!transposed) {
        term.left.data = static_cast<const std::byte*>(term.left.data) + part.first * element_;
        term.left.cols = part.weight.packed.rows;
      }
      terms[i].push_back(term);
    }
    if (du) {
      terms[i].push_back(places_of(du, i));
      terms[i].back().weight = transposed ? factor(a, i, projection_.in, rank)
                                          : factor(a_rows(), i, rank, projection_.in);
    }
    LinearProduct& product = products[i];
    product.terms = terms[i];
    product.rows = routing_.rows(i);
    product.out = {static_cast<std::byte*>(out.data) + routing_.first(i) * out.stride * element_,
                   product.rows, out.cols, out.stride};
    product.first_col = first_col;
    if (dout.by_token) product.left_rows = routing_.tokens.data() + routing_.first(i);
  }
  linear_products(problem_.dtype, transposed ? Pass::kForward : Pass::kDx, products, parallel_for_);
}

}  // namespace monograph
