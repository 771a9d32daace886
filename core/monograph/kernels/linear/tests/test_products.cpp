// A list of products against a product in double, and each to the bit against the product alone:
// rows gathered and scattered in any order, rows skipped, many slices of one weight.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"
#include "monograph/formats/slice.h"
#include "monograph/formats/tests/small_weights.h"
#include "monograph/kernels/dequantize/dequantize.h"
#include "monograph/kernels/linear/linear.h"
#include "monograph/kernels/linear/tests/product.h"
#include "monograph/kernels/linear/tests/random_elements.h"

namespace monograph {
namespace {

struct Rows {
  DType dtype;
  std::size_t rows, cols;
  Bytes bytes;
  Rows(DType t, std::size_t r, std::size_t c)
      : dtype(t), rows(r), cols(c), bytes(r * c * size_bytes(t), 0xab) {}
  std::size_t row_bytes() const { return cols * size_bytes(dtype); }
  std::uint8_t* row(std::size_t r) { return bytes.data() + r * row_bytes(); }
  const std::uint8_t* row(std::size_t r) const { return bytes.data() + r * row_bytes(); }
  double at(std::size_t r, std::size_t c) const {
    return with_type(dtype, [&]<class T>() {
      T element;
      std::memcpy(&element, row(r) + c * sizeof(T), sizeof(T));
      return static_cast<double>(to_float(element));
    });
  }
  Matrix view() const { return {bytes.data(), rows, cols, cols}; }
  MutableMatrix out() { return {bytes.data(), rows, cols, cols}; }
};

Rows random_rows(DType dtype, std::size_t rows, std::size_t cols, unsigned seed) {
  Rows m(dtype, rows, cols);
  m.bytes = random_elements(dtype, rows * cols, seed);
  return m;
}

// A weight of several matrices, which of the rows of x each takes and where its results go.
struct Experts {
  DType dtype;
  Pass pass;
  const PackedView& weight;
  std::size_t count, in, out;  // columns of x and of the result
  Rows x, u, bias;
  std::vector<std::vector<std::uint32_t>> from, to;
  std::vector<Bytes> plain;  // the low-rank factor of each
  std::vector<std::vector<LinearTerm>> terms;

  Experts(DType t, Pass p, const SmallWeight& w)
      : dtype(t),
        pass(p),
        weight(w.view),
        count(w.shape[0]),
        in(p == Pass::kForward ? w.shape[2] : w.shape[1]),
        out(p == Pass::kForward ? w.shape[1] : w.shape[2]),
        x(random_rows(t, 60, in, 1)),
        u(random_rows(t, 60, 4, 2)),
        bias(random_rows(t, 1, out, 3)) {
    constexpr std::size_t kTokens[] = {0, 1, 37, 5, 16, 21};
    std::mt19937 random(4);
    std::vector<std::uint32_t> places(100);
    std::iota(places.begin(), places.end(), 0u);
    std::shuffle(places.begin(), places.end(), random);
    for (std::size_t e = 0; e < count; ++e) {
      from.emplace_back();
      to.emplace_back();
      for (std::size_t i = 0; i < kTokens[e % 6]; ++i) {
        from[e].push_back(i % 9 == 4 ? kSkippedRow : static_cast<std::uint32_t>(random() % 60));
        to[e].push_back(i % 11 == 7 ? kSkippedRow : places.back());
        places.pop_back();
      }
      plain.push_back(random_rows(DType::kFloat32, out, 4, 5 + static_cast<unsigned>(e)).bytes);
      const std::size_t each = weight.matrix_rows;
      terms.push_back({{x.view(), {slice_rows(weight, e * each, each), DType::kFloat32}}});
      if (e % 2 == 0) terms.back().push_back({u.view(), low_rank(e)});
    }
  }

  // B [out, 4] forward, A [4, out] for dx.
  LinearWeight low_rank(std::size_t e) const {
    LinearWeight b;
    b.packed.rows = pass == Pass::kForward ? out : 4;
    b.packed.cols = pass == Pass::kForward ? 4 : out;
    b.packed.values = plain[e].data();
    return b;
  }

  std::vector<LinearProduct> products(Rows& y) const {
    std::vector<LinearProduct> list;
    for (std::size_t e = 0; e < count; ++e) {
      LinearProduct product = {terms[e], y.out(), from[e].size(), from[e].data(), to[e].data()};
      if (biased(e)) product.bias = bias.bytes.data();
      list.push_back(product);
    }
    return list;
  }

  bool biased(std::size_t e) const { return pass == Pass::kForward && e % 3 == 2; }
  bool kept(std::size_t e, std::size_t i) const {
    return from[e][i] != kSkippedRow && to[e][i] != kSkippedRow;
  }
};

// One row of one product alone: a batch of one, from a copy.
Bytes alone(const LinearKernels& kernels, const Experts& e, std::size_t expert, std::size_t row) {
  Rows y(e.dtype, 1, e.out);
  std::vector<LinearTerm> terms = e.terms[expert];
  for (LinearTerm& term : terms) {
    const auto* data = static_cast<const std::uint8_t*>(term.left.data);
    term.left.data = data + row * term.left.cols * size_bytes(e.dtype);
    term.left.rows = 1;
  }
  const void* bias = e.biased(expert) ? e.bias.bytes.data() : nullptr;
  if (e.pass == Pass::kForward) {
    const LinearOutput output = {terms[0].weight, std::span<const LinearTerm>(terms).subspan(1),
                                 bias, y.out()};
    linear_with(kernels, e.dtype, terms[0].left, {&output, 1}, serial_for);
  } else {
    linear_dx_with(kernels, e.dtype, terms, y.out(), serial_for);
  }
  return y.bytes;
}

double exact(const Experts& e, const std::vector<float>& elements, std::size_t expert,
             std::size_t row, std::size_t col, double& magnitude) {
  const std::size_t each = e.weight.matrix_rows, cols = e.weight.cols;
  double sum = e.biased(expert) ? e.bias.at(0, col) : 0;
  magnitude = std::fabs(sum);
  const auto add = [&](double left, double right) {
    sum += left * right;
    magnitude += std::fabs(left * right);
  };
  const auto rounded = [&](float value) {
    return with_type(e.dtype, [&]<class T>() { return double(to_float(from_float<T>(value))); });
  };
  for (std::size_t r = 0; r < e.in; ++r) {
    const std::size_t at = e.pass == Pass::kForward ? col * cols + r : r * cols + col;
    add(e.x.at(row, r), rounded(elements[expert * each * cols + at]));
  }
  for (std::size_t r = 0; expert % 2 == 0 && r < 4; ++r) {
    const std::size_t at = e.pass == Pass::kForward ? col * 4 + r : r * e.out + col;
    add(e.u.at(row, r), rounded(load_f32(e.plain[expert].data() + 4 * at)));
  }
  return sum;
}

void check(const LinearKernels& kernels, const Experts& e, const std::vector<float>& elements) {
  Rows y(e.dtype, 100, e.out);
  for (const int threads : {1, 2, 4}) {
    ThreadPool pool(threads);
    Rows again(e.dtype, 100, e.out);
    linear_products_with(kernels, e.dtype, e.products(again),
                         [&](std::size_t count, std::size_t grain, ParallelBody body) {
                           pool.parallel_for(count, grain, body);
                         });
    if (threads == 1) y = again;
    ASSERT_EQ(y.bytes, again.bytes) << threads << " threads";
  }
  const double round = e.dtype == DType::kFloat32   ? 0x1p-24
                       : e.dtype == DType::kFloat16 ? 0x1p-11
                                                    : 0x1p-8;
  std::vector<bool> written(100);
  for (std::size_t expert = 0; expert < e.count; ++expert)
    for (std::size_t i = 0; i < e.from[expert].size(); ++i) {
      if (!e.kept(expert, i)) continue;
      const std::size_t row = e.from[expert][i], place = e.to[expert][i];
      written[place] = true;
      const Bytes want = alone(kernels, e, expert, row);
      ASSERT_EQ(std::memcmp(y.row(place), want.data(), want.size()), 0)
          << "row " << i << " of product " << expert;
      for (std::size_t col = 0; i % 4 == 0 && col < e.out; ++col) {
        double magnitude = 0;
        const double sum = exact(e, elements, expert, row, col, magnitude);
        const double sums = 0x1p-24 * (6 + std::sqrt(static_cast<double>(e.in))) * magnitude;
        ASSERT_NEAR(y.at(place, col), sum, 1.01 * (round * std::fabs(sum) + sums) + 0x1p-24);
      }
    }
  const Bytes untouched(y.row_bytes(), 0xab);
  for (std::size_t row = 0; row < 100; ++row)
    if (!written[row]) {
      ASSERT_EQ(std::memcmp(y.row(row), untouched.data(), untouched.size()), 0) << row;
    }
}

TEST(LinearProducts, DxRefusesWhatIsForwardAlone) {
  const float gain[4] = {};
  LinearProduct product;
  product.gain = gain;
  EXPECT_THROW(linear_products(DType::kFloat32, Pass::kDx, {&product, 1}, serial_for), Error);
}

TEST(LinearProducts, ExpertsOfOneWeightWithGatheredAndSkippedRows) {
  using enum ScaleKind;
  std::vector<SmallWeight> weights;
  // 35 x 90 elements: no whole number of blocks, so blocks and groups run from expert to expert.
  weights.push_back(small_weight("nf4", kFp32, 64, true, {6, 35, 90}, 1));
  weights.push_back(small_weight("mxfp4", kE8m0, 32, false, {6, 130, 96}, 2));
  weights.push_back(small_weight("nvfp4", kE4m3, 16, false, {6, 33, 128}, 3));
  weights.push_back(small_weight("fp8-block", kBf16, 128, false, {6, 140, 64}, 4));
  for (const SmallWeight& w : weights) {
    SCOPED_TRACE(w.name);
    std::vector<float> elements(w.view.elements());
    dequantize(w.view, DType::kFloat32, elements.data(), serial_for);
    for (const LinearVariant& variant : linear_variants()) {
      if (variant.isa > best_isa() || variant.dtype == DType::kFloat16) continue;
      SCOPED_TRACE(std::string(name_of(variant.isa)) + " " + name_of(variant.dtype));
      check(*variant.run, Experts(variant.dtype, variant.pass, w), elements);
    }
  }
}

// A reduction longer than what is packed at a time, beside a short one; more rows than a block.
// Two passes over the rows, and on AMX two loads of the reduction: the sums of all panels wait.
TEST(LinearProducts, DxOfManyRowsHasTheBitsOfAFew) {
  for (const LinearVariant& variant : linear_variants()) {
    if (variant.isa > best_isa() || variant.dtype != DType::kBFloat16) continue;
    if (variant.pass != Pass::kDx) continue;
    constexpr std::size_t kMany = 1024, kFew = 40, kIn = 1120, kOut = 192;
    const Rows w = random_rows(variant.dtype, kIn, kOut, 1);
    const Bytes left = random_elements(variant.dtype, kMany * kIn, 2);
    LinearWeight weight;
    weight.dtype = variant.dtype;
    weight.packed.rows = kIn;
    weight.packed.cols = kOut;
    weight.packed.values = w.bytes.data();
    Bytes many = product(*variant.run, variant.dtype, Pass::kDx, left, kMany, weight);
    many.resize(w.row_bytes() * kFew);
    EXPECT_EQ(many, product(*variant.run, variant.dtype, Pass::kDx, left, kFew, weight));
  }
}

TEST(LinearProducts, LongReductionsWaitInAList) {
  for (const LinearVariant& variant : linear_variants()) {
    if (variant.isa > best_isa() || variant.dtype != DType::kBFloat16) continue;
    if (variant.pass != Pass::kForward) continue;
    constexpr std::size_t kRows = 270, kLong = 4480, kOut = 20;
    const Rows x = random_rows(variant.dtype, kRows, kLong, 1);
    const Rows w = random_rows(variant.dtype, kOut, kLong, 2);
    const Rows short_x = random_rows(variant.dtype, kRows, 64, 3);
    const Rows short_w = random_rows(variant.dtype, kOut, 64, 4);
    const auto plain = [&](const Rows& m) {
      LinearWeight weight;
      weight.dtype = variant.dtype;
      weight.packed.rows = m.rows;
      weight.packed.cols = m.cols;
      weight.packed.values = m.bytes.data();
      return weight;
    };
    std::vector<std::uint32_t> turned(kRows);
    for (std::size_t i = 0; i < kRows; ++i) turned[i] = static_cast<std::uint32_t>(kRows - 1 - i);
    const LinearTerm terms[] = {{x.view(), plain(w)}, {short_x.view(), plain(short_w)}};
    Rows y(variant.dtype, kRows, kOut), z(variant.dtype, kRows, kOut);
    const LinearProduct products[] = {{{terms + 1, 1}, z.out(), kRows},
                                      {{terms, 1}, y.out(), kRows, turned.data(), nullptr},
                                      {{terms, 2}, z.out(), 0}};
    linear_products_with(*variant.run, variant.dtype, products, serial_for);
    Rows y_alone(variant.dtype, kRows, kOut), z_alone(variant.dtype, kRows, kOut);
    const LinearOutput one = {terms[0].weight, {}, nullptr, y_alone.out()};
    const LinearOutput two = {terms[1].weight, {}, nullptr, z_alone.out()};
    linear_with(*variant.run, variant.dtype, x.view(), {&one, 1}, serial_for);
    linear_with(*variant.run, variant.dtype, short_x.view(), {&two, 1}, serial_for);
    EXPECT_EQ(z.bytes, z_alone.bytes);
    for (std::size_t i = 0; i < kRows; ++i)
      ASSERT_EQ(std::memcmp(y.row(i), y_alone.row(turned[i]), y.row_bytes()), 0) << i;
  }
}

// Strips of columns, and a term whose rows are not gathered: to the bit the columns of the whole
// with that term's rows gathered beforehand.
TEST(LinearProducts, StripsOfColumnsAndTermsInOrder) {
  const SmallWeight w = small_weight("mxfp4", ScaleKind::kE8m0, 32, false, {320, 288}, 5);
  constexpr std::size_t kRows = 50, kRank = 4;
  for (const LinearVariant& variant : linear_variants()) {
    if (variant.isa > best_isa() || variant.dtype == DType::kFloat16) continue;
    SCOPED_TRACE(std::string(name_of(variant.isa)) + " " + name_of(variant.dtype));
    const bool forward = variant.pass == Pass::kForward;
    const std::size_t in = forward ? 288 : 320, out = forward ? 320 : 288;
    const Rows x = random_rows(variant.dtype, kRows, in, 1);
    const Rows u = random_rows(variant.dtype, kRows, kRank, 2),
               bias = random_rows(variant.dtype, 1, out, 3);
    const Bytes factor = random_elements(variant.dtype, out * kRank, 4);
    LinearWeight low;
    low.dtype = variant.dtype;
    low.packed.rows = forward ? out : kRank;
    low.packed.cols = forward ? kRank : out;
    low.packed.values = factor.data();
    std::vector<std::uint32_t> from(kRows);
    for (std::size_t i = 0; i < kRows; ++i)
      from[i] = i % 7 == 3 ? kSkippedRow : static_cast<std::uint32_t>(i * 17 % kRows);
    Rows gathered(variant.dtype, kRows, kRank);  // row from[i] is row i of u
    for (std::size_t i = 0; i < kRows; ++i)
      if (from[i] != kSkippedRow) std::memcpy(gathered.row(from[i]), u.row(i), u.row_bytes());
    const LinearTerm whole[] = {{x.view(), {w.view, DType::kFloat32}}, {gathered.view(), low}};
    const LinearTerm apart[] = {{x.view(), {w.view, DType::kFloat32}}, {u.view(), low, true}};
    Rows y(variant.dtype, kRows, out), strips(variant.dtype, kRows, out);
    LinearProduct product = {whole, y.out(), kRows, from.data()};
    if (forward) product.bias = bias.bytes.data();
    linear_products_with(*variant.run, variant.dtype, {&product, 1}, serial_for);
    for (std::size_t first = 0; first < out; first += 128) {
      const std::size_t cols = std::min<std::size_t>(128, out - first);
      const std::size_t bytes = first * size_bytes(variant.dtype);
      LinearProduct strip = {
          apart, {strips.bytes.data() + bytes, kRows, cols, out}, kRows, from.data()};
      if (forward) strip.bias = bias.bytes.data() + bytes;
      strip.first_col = first;
      linear_products_with(*variant.run, variant.dtype, {&strip, 1}, serial_for);
    }
    EXPECT_EQ(strips.bytes, y.bytes);
  }
}

}  // namespace
}  // namespace monograph
