// Bit by bit against a chain of std::fma: sizes around tiles, strips, vectors and passes, every
// type in and out, strides, slices of the tokens, threads, what is not finite; and every variant's
// parts.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/base/tests/random_elements.h"
#include "monograph/kernels/gram/gram.h"

namespace monograph {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <class T>
struct Factors {
  std::size_t tokens, rows, cols, left_stride, right_stride;
  std::vector<T> left, right;

  Factors(std::size_t t, std::size_t m, std::size_t n, std::size_t gap = 0, unsigned seed = 1)
      : tokens(t),
        rows(m),
        cols(n),
        left_stride(m + gap),
        right_stride(n + 2 * gap),
        left(random_elements<T>(t * left_stride, seed, 0.f)),
        right(random_elements<T>(t * right_stride, seed + 1, 0.f)) {}

  // Tokens [begin, end).
  GramProblem problem(const float* sum, DType dtype, void* out, std::size_t begin,
                      std::size_t end) const {
    return {dtype_of<T>,
            {left.data() + begin * left_stride, end - begin, rows, left_stride},
            {right.data() + begin * right_stride, end - begin, cols, right_stride},
            sum,
            dtype,
            out};
  }
  float chain(std::size_t i, std::size_t j, float sum = 0.f) const {
    for (std::size_t t = 0; t < tokens; ++t)
      sum =
          std::fma(to_float(left[t * left_stride + i]), to_float(right[t * right_stride + j]), sum);
    return sum;
  }
};

template <class Out>
bool same(Out a, Out b) {
  const float x = to_float(a), y = to_float(b);
  return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(x) && std::isnan(y));
}

template <class T, class Out>
void check(const Factors<T>& factors, ParallelFor parallel_for = serial_for) {
  std::vector<Out> out(factors.rows * factors.cols + 1, from_float<Out>(7.f));
  gram(factors.problem(nullptr, dtype_of<Out>, out.data(), 0, factors.tokens), parallel_for);
  for (std::size_t i = 0; i < factors.rows; ++i)
    for (std::size_t j = 0; j < factors.cols; ++j)
      ASSERT_TRUE(same(out[i * factors.cols + j], from_float<Out>(factors.chain(i, j))))
          << factors.tokens << " tokens, " << i << " of " << factors.rows << ", " << j << " of "
          << factors.cols;
  ASSERT_EQ(to_float(out.back()), 7.f);
}

template <class T>
void check_shapes() {
  for (const std::size_t tokens : {1, 2, 31, 33, 64, 65, 130})
    for (const auto& [rows, cols] : std::vector<std::pair<std::size_t, std::size_t>>{{1, 1},
                                                                                     {1, 70},
                                                                                     {70, 1},
                                                                                     {3, 31},
                                                                                     {4, 32},
                                                                                     {5, 33},
                                                                                     {8, 64},
                                                                                     {64, 8},
                                                                                     {9, 15},
                                                                                     {16, 47},
                                                                                     {47, 16},
                                                                                     {17, 17},
                                                                                     {20, 600},
                                                                                     {600, 20}}) {
      check<T, float>(Factors<T>(tokens, rows, cols));
      if (tokens == 33) {
        check<T, Bf16>(Factors<T>(tokens, rows, cols, /*gap=*/3));
        check<T, Fp16>(Factors<T>(tokens, rows, cols, /*gap=*/1));
      }
    }
}

TEST(Gram, AChainInTheOrderOfTheTokensForEveryShape) {
  check_shapes<float>();
  check_shapes<Bf16>();
  check_shapes<Fp16>();
}

TEST(Gram, NoTokensGiveTheSumOrZeros) {
  for (const std::size_t rows : {0, 1, 5}) {
    const Factors<Bf16> none(0, rows, 40);
    std::vector<float> out(rows * 40 + 1, 7.f);
    gram(none.problem(nullptr, DType::kFloat32, out.data(), 0, 0), serial_for);
    for (std::size_t i = 0; i < rows * 40; ++i) ASSERT_EQ(out[i], 0.f);
    ASSERT_EQ(out.back(), 7.f);
    const std::vector<float> before = random_elements<float>(rows * 40, 5);
    gram(none.problem(before.data(), DType::kFloat32, out.data(), 0, 0), serial_for);
    ASSERT_EQ(0, std::memcmp(out.data(), before.data(), rows * 40 * sizeof(float)));
  }
}

// Wherever the tokens are cut, in place and not, with the narrow factor on either side.
TEST(Gram, SlicesOfTokensChangeNoBit) {
  for (const auto& [rows, cols] :
       std::vector<std::pair<std::size_t, std::size_t>>{{5, 77}, {77, 5}, {16, 96}}) {
    const Factors<Bf16> factors(150, rows, cols);
    std::vector<float> whole(rows * cols), sum(rows * cols), next(rows * cols);
    gram(factors.problem(nullptr, DType::kFloat32, whole.data(), 0, 150), serial_for);
    for (const std::size_t cut : {1, 31, 32, 63, 64, 100, 149}) {
      gram(factors.problem(nullptr, DType::kFloat32, sum.data(), 0, cut), serial_for);
      gram(factors.problem(sum.data(), DType::kFloat32, next.data(), cut, 150), serial_for);
      ASSERT_EQ(whole, next) << cut;
      gram(factors.problem(sum.data(), DType::kFloat32, sum.data(), cut, 150), serial_for);
      ASSERT_EQ(whole, sum) << cut;
    }
    // The last slice may round.
    std::vector<Bf16> rounded(rows * cols);
    gram(factors.problem(nullptr, DType::kFloat32, sum.data(), 0, 90), serial_for);
    gram(factors.problem(sum.data(), DType::kBFloat16, rounded.data(), 90, 150), serial_for);
    for (std::size_t i = 0; i < rounded.size(); ++i)
      ASSERT_EQ(rounded[i].bits, from_float<Bf16>(whole[i]).bits);
  }
}

TEST(Gram, AnyNumberOfThreads) {
  for (const int threads : {2, 3, 5}) {
    ThreadPool pool(threads);
    check<Bf16, float>(Factors<Bf16>(70, 9, 1500),
                       [&](std::size_t n, std::size_t grain, ParallelBody body) {
                         pool.parallel_for(n, grain, body);
                       });
  }
}

// A sum of many chunks: the rank is large too.
TEST(Gram, BothFactorsWide) { check<float, float>(Factors<float>(40, 700, 900)); }

TEST(Gram, WhatIsNotFiniteStaysInItsRowAndColumn) {
  for (const float bad : {kNan, kInfinity}) {
    Factors<float> factors(40, 6, 50);
    factors.left[10 * factors.left_stride + 4] = bad;
    factors.right[20 * factors.right_stride + 49] = bad;
    check<float, float>(factors);
    check<float, Bf16>(factors);
  }
}

// Products below the normal numbers are kept.
TEST(Gram, SmallNumbersAreNotFlushed) {
  Factors<float> factors(33, 4, 32);
  for (float& x : factors.left) x *= 1e-20f;
  for (float& x : factors.right) x *= 1e-20f;
  check<float, float>(factors);
  ASSERT_NE(factors.chain(0, 0), 0.f);
}

// |error| <= tokens * 2^-24 * sum of |products|: the chain is a sum in fp32.
TEST(Gram, CloseToDouble) {
  const Factors<Bf16> factors(500, 8, 64);
  std::vector<float> out(8 * 64);
  gram(factors.problem(nullptr, DType::kFloat32, out.data(), 0, 500), serial_for);
  for (std::size_t i = 0; i < 8; ++i)
    for (std::size_t j = 0; j < 64; ++j) {
      double want = 0, size = 0;
      for (std::size_t t = 0; t < 500; ++t) {
        const double product =
            double(to_float(factors.left[t * 8 + i])) * double(to_float(factors.right[t * 64 + j]));
        want += product;
        size += std::abs(product);
      }
      ASSERT_NEAR(out[i * 64 + j], want, 500 * 0x1p-24 * size);
    }
}

// The parts of each variant, whatever this machine would pick.
template <class T>
void check_parts(const GramKernels& kernels) {
  constexpr std::size_t kTokens = 37, kRank = 7, kCols = 45, kStride = 64, kTiles = 2;
  const Factors<T> factors(kTokens, kRank, kCols, 2);
  std::vector<float> tiles(kTiles * kGramTile * kTokens, 9.f);
  const GramTiles job = {factors.left.data(), factors.left_stride, kRank, kTokens, tiles.data()};
  kernels.pack(job, 0, 11);
  kernels.pack(job, 11, kTokens);
  for (std::size_t i = 0; i < kTiles * kGramTile; ++i)
    for (std::size_t t = 0; t < kTokens; ++t)
      ASSERT_EQ(tiles[(i / kGramTile * kTokens + t) * kGramTile + i % kGramTile],
                i < kRank ? to_float(factors.left[t * factors.left_stride + i]) : 0.f);

  std::vector<float> sums = random_elements<float>(kTiles * kGramTile * kStride, 3);
  const std::vector<float> before = sums;
  kernels.add({tiles.data(), kTokens * kGramTile, kTiles, factors.right.data(),
               factors.right_stride, kCols, kTokens, sums.data(), kStride});
  for (std::size_t i = 0; i < kRank; ++i)
    for (std::size_t j = 0; j < kCols; ++j)
      ASSERT_EQ(sums[i * kStride + j], factors.chain(i, j, before[i * kStride + j]));

  for (const bool turned : {false, true}) {
    const std::size_t stride = (turned ? kRank : kCols) + 1;
    std::vector<T> out((turned ? kCols : kRank) * stride, from_float<T>(9.f));
    kernels.store({sums.data(), kStride, kRank, kCols, turned, out.data(), stride});
    for (std::size_t i = 0; i < kRank; ++i)
      for (std::size_t j = 0; j < kCols; ++j)
        ASSERT_TRUE(same(out[turned ? j * stride + i : i * stride + j],
                         from_float<T>(sums[i * kStride + j])));
    for (std::size_t row = 0; row < out.size() / stride; ++row)
      ASSERT_EQ(to_float(out[row * stride + stride - 1]), 9.f);
  }
}

TEST(Gram, EveryVariant) {
  for (const auto& variant : gram_variants()) {
    if (variant.isa > best_isa()) continue;
    with_type(variant.dtype, [&]<class T>() { check_parts<T>(*variant.run); });
  }
}

}  // namespace
}  // namespace monograph
