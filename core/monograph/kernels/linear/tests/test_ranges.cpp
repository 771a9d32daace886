// Ranges of rows with terms of their own, each to the bit what a product of its rows alone gives,
// and that against a product in double: ranks above every chunk, borders anywhere, one row each,
// infinities of a neighbour.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"
#include "monograph/formats/tests/small_weights.h"
#include "monograph/kernels/dequantize/dequantize.h"
#include "monograph/kernels/linear/linear.h"
#include "monograph/kernels/linear/tests/random_elements.h"

namespace monograph {
namespace {

struct Adapter {
  std::size_t rows, rank;
  bool bias = false, gain = false;
};

// Adapters beside one weight, forward or dx: the operands of all of them.
struct Case {
  DType dtype;
  Pass pass;
  LinearWeight weight;
  std::vector<Adapter> adapters;
  std::size_t in, out, rows = 0, width = 1;
  Bytes x, u, bias;
  std::vector<float> gain;
  std::vector<Bytes> factors;
  std::vector<std::vector<LinearTerm>> own;
  LinearTerm shared;
  std::vector<RowRange> ranges;

  Case(DType t, Pass p, const PackedView& w, std::vector<Adapter> all)
      : dtype(t),
        pass(p),
        weight{w, t},
        adapters(std::move(all)),
        in(p == Pass::kForward ? w.cols : w.rows),
        out(p == Pass::kForward ? w.rows : w.cols) {
    for (const Adapter& one : adapters) {
      rows += one.rows;
      width = std::max(width, one.rank);
    }
    x = random_elements(dtype, rows * in, 1);
    u = random_elements(dtype, rows * width, 2);
    bias = random_elements(dtype, out * adapters.size(), 3);
    const Bytes gains = random_elements(DType::kFloat32, out * adapters.size(), 4);
    for (std::size_t i = 0; i < out * adapters.size(); ++i)
      gain.push_back(load_f32(gains.data() + 4 * i));
    shared = {{x.data(), rows, in, in}, weight};
    std::size_t first = 0;
    for (std::size_t i = 0; i < adapters.size(); ++i) {
      const Adapter& one = adapters[i];
      factors.push_back(random_elements(dtype, out * one.rank, 5 + static_cast<unsigned>(i)));
      own.emplace_back();
      if (one.rank != 0) {
        LinearWeight factor;
        factor.dtype = dtype;
        factor.packed.rows = pass == Pass::kForward ? out : one.rank;
        factor.packed.cols = pass == Pass::kForward ? one.rank : out;
        factor.packed.values = factors[i].data();
        own[i].push_back({{u.data(), rows, one.rank, width}, factor});
      }
      ranges.push_back({first, one.rows, {}, bias_of(i), gain_of(i)});
      first += one.rows;
    }
    for (std::size_t i = 0; i < adapters.size(); ++i) ranges[i].terms = own[i];
  }

  const void* bias_of(std::size_t i) const {
    const bool has = adapters[i].bias && pass == Pass::kForward;
    return has ? bias.data() + i * out * size_bytes(dtype) : nullptr;
  }
  const float* gain_of(std::size_t i) const {
    return adapters[i].gain && pass == Pass::kForward ? gain.data() + i * out : nullptr;
  }

  Bytes together(const LinearKernels& kernels, ParallelFor parallel_for) const {
    Bytes y(rows * out * size_bytes(dtype), 0xab);
    LinearProduct product = {{&shared, 1}, {y.data(), rows, out, out}, rows};
    product.ranges = ranges;
    linear_ranges_with(kernels, dtype, product, parallel_for);
    return y;
  }

  // The rows of one adapter, a copy of them, with its term like any other product's.
  Bytes alone(const LinearKernels& kernels, std::size_t i) const {
    const std::size_t count = adapters[i].rows, first = ranges[i].first, bytes = size_bytes(dtype);
    const Bytes own_x(x.begin() + static_cast<std::ptrdiff_t>(first * in * bytes),
                      x.begin() + static_cast<std::ptrdiff_t>((first + count) * in * bytes));
    Bytes y(count * out * bytes);
    std::vector<LinearTerm> terms = {{{own_x.data(), count, in, in}, weight}};
    for (LinearTerm term : own[i]) {
      term.left.data = u.data() + first * width * bytes;
      term.left.rows = count;
      terms.push_back(term);
    }
    const MutableMatrix to = {y.data(), count, out, out};
    if (pass == Pass::kDx) {
      linear_dx_with(kernels, dtype, terms, to, serial_for);
    } else {
      const LinearOutput output = {weight, std::span<const LinearTerm>(terms).subspan(1),
                                   bias_of(i), to, gain_of(i)};
      linear_with(kernels, dtype, terms[0].left, {&output, 1}, serial_for);
    }
    return y;
  }

  double at(const Bytes& bytes, std::size_t i) const {
    return with_type(dtype, [&]<class T>() {
      T element;
      std::memcpy(&element, bytes.data() + i * sizeof(T), sizeof(T));
      return static_cast<double>(to_float(element));
    });
  }
};

void expect_alone(const Case& c, const LinearKernels& kernels, const Bytes& y, std::size_t i) {
  const std::size_t row_bytes = c.out * size_bytes(c.dtype);
  const Bytes want = c.alone(kernels, i);
  for (std::size_t r = 0; r < c.adapters[i].rows; ++r)
    ASSERT_EQ(std::memcmp(y.data() + (c.ranges[i].first + r) * row_bytes,
                          want.data() + r * row_bytes, row_bytes),
              0)
        << "row " << r << " of adapter " << i;
}

void check(const Case& c, const LinearKernels& kernels) {
  const Bytes y = c.together(kernels, serial_for);
  for (std::size_t i = 0; i < c.adapters.size(); ++i) expect_alone(c, kernels, y, i);
  for (const int threads : {2, 4}) {
    ThreadPool pool(threads);
    const Bytes again =
        c.together(kernels, [&](std::size_t count, std::size_t grain, ParallelBody body) {
          pool.parallel_for(count, grain, body);
        });
    ASSERT_EQ(y, again) << threads << " threads";
  }
}

template <class Run>
void every_variant(Run run) {
  for (const LinearVariant& variant : linear_variants()) {
    if (variant.isa > best_isa()) continue;
    SCOPED_TRACE(std::string(name_of(variant.isa)) + " " + name_of(variant.dtype) +
                 (variant.pass == Pass::kForward ? " forward" : " dx"));
    run(variant);
  }
}

// A plain weight of the type of a variant.
struct PlainWeight {
  Bytes bytes;
  PackedView view;
  PlainWeight(DType dtype, std::size_t rows, std::size_t cols)
      : bytes(random_elements(dtype, rows * cols, 9)) {
    view.rows = rows;
    view.cols = cols;
    view.values = bytes.data();
  }
};

const std::vector<std::vector<Adapter>> kMixtures = {
    {{5, 8}, {4, 0, true}, {0, 12}, {17, 33, false, true}, {1, 1}, {33, 16, true}},
    {{3, 1}, {40, 12}, {18, 33, true, true}},
    {{100, 300}, {3, 200, true}, {61, 600}, {2, 0}},
    {{1, 4}, {1, 5}, {1, 0, true}, {1, 0}, {1, 6, false, true}, {1, 7}, {1, 8}, {1, 9}},
    {{48, 16}, {96, 16}, {32, 16}, {64, 16}},
    {{70, 16}},
};

TEST(LinearRanges, EachHasTheBitsOfItsRowsAlone) {
  const SmallWeight w = small_weight("nf4", ScaleKind::kFp32, 64, true, {140, 576}, 1);
  every_variant([&](const LinearVariant& variant) {
    for (const auto& mixture : kMixtures)
      check(Case(variant.dtype, variant.pass, w.view, mixture), *variant.run);
  });
}

// The reduction waits in several loads, the rows come in several passes.
TEST(LinearRanges, LongReductionsAndManyRows) {
  every_variant([&](const LinearVariant& variant) {
    if (variant.dtype == DType::kFloat16) return;
    const PlainWeight w(variant.dtype, 100, 2200);
    check(Case(variant.dtype, variant.pass, w.view, {{401, 20, true}, {1, 600}, {333, 33}, {9, 0}}),
          *variant.run);
    const PlainWeight turned(variant.dtype, 2200, 100);
    check(Case(variant.dtype, variant.pass, turned.view, {{300, 20}, {77, 8, false, true}}),
          *variant.run);
  });
}

TEST(LinearRanges, MoreThanAProductMayHave) {
  every_variant([&](const LinearVariant& variant) {
    const PlainWeight w(variant.dtype, 40, 96);
    std::vector<Adapter> many;
    for (std::size_t i = 0; i < 2 * kMostRanges + 5; ++i) many.push_back({i % 4, 1 + i % 9});
    check(Case(variant.dtype, variant.pass, w.view, many), *variant.run);
  });
}

TEST(LinearRanges, AgainstAProductInDouble) {
  every_variant([&](const LinearVariant& variant) {
    const PlainWeight w(variant.dtype, 37, 41);
    const Case c(variant.dtype, variant.pass, w.view, {{5, 8, true}, {20, 3, true, true}, {2, 0}});
    const Bytes y = c.together(*variant.run, serial_for);
    const double round = c.dtype == DType::kFloat32   ? 0x1p-24
                         : c.dtype == DType::kFloat16 ? 0x1p-11
                                                      : 0x1p-8;
    for (std::size_t i = 0; i < c.adapters.size(); ++i)
      for (std::size_t r = 0; r < c.adapters[i].rows; ++r)
        for (std::size_t p = 0; p < c.out; ++p) {
          const std::size_t row = c.ranges[i].first + r, rank = c.adapters[i].rank;
          double sum = 0, magnitude = 0;
          const auto add = [&](double left, double right) {
            sum += left * right;
            magnitude += std::fabs(left * right);
          };
          const bool forward = c.pass == Pass::kForward;
          for (std::size_t k = 0; k < c.in; ++k)
            add(c.at(c.x, row * c.in + k), c.at(w.bytes, forward ? p * c.in + k : k * c.out + p));
          for (std::size_t k = 0; k < rank; ++k)
            add(c.at(c.u, row * c.width + k),
                c.at(c.factors[i], forward ? p * rank + k : k * c.out + p));
          const double gain = c.gain_of(i) == nullptr ? 1 : double(c.gain_of(i)[p]);
          sum *= gain;
          magnitude *= std::fabs(gain);
          if (c.bias_of(i) != nullptr) add(c.at(c.bias, i * c.out + p), 1);
          const double sums = 0x1p-24 * (8 + std::sqrt(double(c.in))) * magnitude;
          ASSERT_NEAR(c.at(y, row * c.out + p), sum, 1.01 * (round * std::fabs(sum) + sums));
        }
  });
}

TEST(LinearRanges, WhatIsNotFiniteStaysInItsRange) {
  const SmallWeight w = small_weight("mxfp4", ScaleKind::kE8m0, 32, false, {96, 128}, 2);
  every_variant([&](const LinearVariant& variant) {
    for (const float value : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
      Case c(variant.dtype, variant.pass, w.view, {{9, 8}, {20, 16, true, true}, {3, 4}, {30, 8}});
      with_type(c.dtype, [&]<class T>() {
        const T bad = from_float<T>(value);
        for (std::size_t i = 0; i < c.factors[1].size(); i += sizeof(T))
          std::memcpy(c.factors[1].data() + i, &bad, sizeof(T));
        for (std::size_t i = 0; i < 20 * c.width; i += 3)
          std::memcpy(c.u.data() + (9 * c.width + i) * sizeof(T), &bad, sizeof(T));
      });
      const Bytes y = c.together(*variant.run, serial_for);
      EXPECT_FALSE(std::isfinite(c.at(y, 9 * c.out)));
      for (const std::size_t i : {0u, 2u, 3u}) {
        expect_alone(c, *variant.run, y, i);
        for (std::size_t p = 0; p < c.adapters[i].rows * c.out; ++p)
          ASSERT_TRUE(std::isfinite(c.at(y, c.ranges[i].first * c.out + p)));
      }
    }
  });
}

TEST(LinearRanges, RangesThatDoNotMakeUpTheProductAreRefused) {
  const PlainWeight w(DType::kFloat32, 8, 8);
  Case c(DType::kFloat32, Pass::kForward, w.view, {{3, 2}, {4, 2}});
  Bytes y(7 * 8 * 4);
  LinearProduct product = {{&c.shared, 1}, {y.data(), 7, 8, 8}, 7};
  product.ranges = c.ranges;
  c.ranges[1].first = 2;
  EXPECT_THROW(linear_products(c.dtype, c.pass, {&product, 1}, serial_for), Error);
  c.ranges[1].first = 3;
  product.rows = 6;
  EXPECT_THROW(linear_products(c.dtype, c.pass, {&product, 1}, serial_for), Error);
  product.rows = 7;
  product.bias = c.bias.data();
  EXPECT_THROW(linear_products(c.dtype, c.pass, {&product, 1}, serial_for), Error);
}

}  // namespace
}  // namespace monograph
