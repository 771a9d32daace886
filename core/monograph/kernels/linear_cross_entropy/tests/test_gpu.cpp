// The GPU's rows of the loss on the host harness, against fp64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "monograph/gpu/host/launch.h"
#include "monograph/kernels/linear_cross_entropy/gpu.cuh"

namespace monograph::gpu {
namespace {

using host::Order;
using host::Range;

constexpr float kInf = std::numeric_limits<float>::infinity();

// What a row gives by the definition, in fp64 from the rounded logits.
struct Reference {
  double loss = 0, lse = 0, entropy = 0, log_sum_squares = 0, mean = 0;
  double largest = 0;  // |z|
  bool top = true;
  std::vector<double> gradient, entropy_gradient;

  template <class T>
  Reference(const T* logits, std::size_t count, std::size_t label, LogitsMap map) {
    std::vector<double> z(count), slope(count);
    const double scale = map.scale, cap = map.softcap;
    for (std::size_t i = 0; i < count; ++i) {
      const double x = to_float(logits[i]), t = cap > 0 ? std::tanh(x * scale / cap) : 0;
      z[i] = cap > 0 ? cap * t : x * scale;
      slope[i] = cap > 0 ? scale * (1 - t * t) : scale;
      if (std::isfinite(z[i])) largest = std::max(largest, std::fabs(z[i]));
    }
    const double peak = *std::max_element(z.begin(), z.end());
    double sum = 0;
    for (const double v : z) sum += std::exp(v - peak);
    lse = peak + std::log(sum);
    loss = lse - z[label];
    double squares = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const double p = std::exp(z[i] - lse);
      if (p > 0) entropy -= p * (z[i] - lse);
      squares += p * p;
      mean += z[i] / static_cast<double>(count);
      if (i != label && (z[i] > z[label] || (i < label && z[i] == z[label]))) top = false;
    }
    log_sum_squares = std::log(squares);
    for (std::size_t i = 0; i < count; ++i) {
      const double p = std::exp(z[i] - lse);
      gradient.push_back((p - (i == label ? 1 : 0)) * slope[i]);
      entropy_gradient.push_back(p > 0 ? -p * (z[i] - lse + entropy) * slope[i] : 0);
    }
  }
};

template <class T>
struct Rows {
  std::vector<T> logits;
  std::vector<std::int64_t> labels;
  std::size_t count;
  LogitsMap map;
  std::vector<float> loss, lse, entropy, squares, mean;
  std::unique_ptr<bool[]> top;

  Rows(std::size_t rows, std::size_t n, double spread, LogitsMap m, unsigned seed)
      : count(n), map(m) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal(0, spread);
    for (std::size_t i = 0; i < rows * n; ++i)
      logits.push_back(from_float<T>(static_cast<float>(normal(random))));
    for (std::size_t r = 0; r < rows; ++r)
      labels.push_back(static_cast<std::int64_t>(random() % n));
    for (auto* v : {&loss, &lse, &entropy, &squares, &mean}) v->resize(rows);
    top.reset(new bool[rows]());
  }

  void run(bool statistics, bool gradient, Order order) {
    const LogitsPanel<T> panel = {logits.data(), count, count, map, labels.data()};
    LossRows out = {loss.data(), lse.data(), nullptr, nullptr, nullptr, nullptr};
    if (statistics)
      out = {loss.data(), lse.data(), entropy.data(), squares.data(), mean.data(), top.get()};
    const std::vector<Range> memory = {host::output(logits),  host::input(labels),
                                       host::output(loss),    host::output(lse),
                                       host::output(entropy), host::output(squares),
                                       host::output(mean),    {top.get(), labels.size(), true}};
    host::launch({static_cast<unsigned>(labels.size()), 1, kLossThreads}, memory, order,
                 [&] { loss_rows_kernel<T>(panel, out, gradient); });
  }
  void run_gradient(const std::vector<float>& g, const std::vector<float>* h, std::size_t first) {
    const LogitsPanel<T> panel = {logits.data(), count, count, map, labels.data()};
    const LossGradientRows rows = {lse.data(), g.data(), h == nullptr ? nullptr : h->data(), first};
    std::vector<Range> memory = {host::output(logits), host::input(labels), host::input(lse),
                                 host::input(g)};
    if (h != nullptr) memory.push_back(host::input(*h));
    host::launch({static_cast<unsigned>(labels.size()), 1, kLossThreads}, memory,
                 Order::kDescending, [&] { logits_gradient_kernel<T>(panel, rows); });
  }
};

// exp(z - peak) is off by the roundings of z (2 with a cap, and tanh's 2 ulp), of the difference
// and of exp (2 ulp): less than (6 A + 16) 2^-24 of it, with A the largest |z| or the cap. A sum of
// at most 16 of them adds 16 2^-24, the sums of fp64 nothing.
double relative_bound(double largest, LogitsMap map) {
  return (6 * std::max<double>(largest, map.softcap) + 40) * 0x1p-24;
}
template <class T>
double to_t() {
  return sizeof(T) == 4 ? 0x1p-24 : std::is_same_v<T, Bf16> ? 0x1p-8 : 0x1p-11;
}
// Below the smallest normal number of fp16 a rounding is absolute.
constexpr double kTiny = 0x1p-25;

template <class T>
class GpuLoss : public testing::Test {};
using Types = testing::Types<float, Bf16, Fp16>;
TYPED_TEST_SUITE(GpuLoss, Types);

TYPED_TEST(GpuLoss, RowsWithinTheBoundOfFp64) {
  for (const LogitsMap map : {LogitsMap{1, 0}, LogitsMap{0.25f, 0}, LogitsMap{2, 30}})
    for (const std::size_t count : {1u, 7u, 300u, 5000u}) {
      Rows<TypeParam> start(3, count, 4, map, static_cast<unsigned>(count));
      const std::vector<TypeParam> logits = start.logits;
      std::vector<TypeParam> first;
      for (const Order order : host::kOrders) {
        start.logits = logits;
        start.run(/*statistics=*/true, /*gradient=*/true, order);
        if (first.empty()) first = start.logits;
        ASSERT_EQ(std::memcmp(first.data(), start.logits.data(), first.size() * sizeof(TypeParam)),
                  0);
      }
      for (std::size_t r = 0; r < 3; ++r) {
        const std::size_t label = static_cast<std::size_t>(start.labels[r]);
        const Reference want(&logits[r * count], count, label, map);
        const double e = relative_bound(want.largest, map);
        const auto near = [&](float got, double wanted, double bound) {
          EXPECT_LE(std::fabs(got - wanted), bound + 0x1p-23 * std::fabs(wanted)) << count;
        };
        near(start.loss[r], want.loss, 2 * e);
        near(start.lse[r], want.lse, 2 * e);
        near(start.entropy[r], want.entropy, e * (4 + 2 * want.entropy + 4 * want.largest));
        near(start.squares[r], want.log_sum_squares, 5 * e);
        near(start.mean[r], want.mean, e * (1 + want.largest));
        EXPECT_EQ(start.top[r], want.top);
        for (std::size_t i = 0; i < count; ++i) {
          const double w = want.gradient[i];
          const double bound = 4 * e * map.scale + to_t<TypeParam>() * std::fabs(w) + kTiny;
          ASSERT_LE(std::fabs(to_float(start.logits[r * count + i]) - w), bound) << i;
        }
      }
    }
}

// A slice of the vocabulary, as the weight's gradient walks through it, and the entropy's gradient.
TYPED_TEST(GpuLoss, GradientsFromTheForward) {
  const std::size_t count = 700, first = 200, width = 311;
  const std::vector<std::int64_t> labels = {-100, 210, 699, 0};
  const std::vector<float> g = {1.0f, -0.5f, 2.0f, 0.25f};
  for (const LogitsMap map : {LogitsMap{1, 0}, LogitsMap{0.5f, 20}}) {
    const Rows<TypeParam> whole(4, count, 3, map, 5);
    Rows<TypeParam> slice(4, width, 3, map, 5), entropy(4, count, 3, map, 5);
    slice.labels = entropy.labels = labels;
    std::vector<Reference> want;
    for (std::size_t r = 0; r < 4; ++r) {
      const TypeParam* row = &whole.logits[r * count];
      want.emplace_back(row, count, static_cast<std::size_t>(std::max<std::int64_t>(labels[r], 0)),
                        map);
      std::copy(row + first, row + first + width,
                slice.logits.begin() + static_cast<long>(r * width));
      slice.lse[r] = entropy.lse[r] = static_cast<float>(want[r].lse);
      entropy.entropy[r] = static_cast<float>(want[r].entropy);
    }
    slice.run_gradient(g, nullptr, first);
    const std::vector<float> entropies = entropy.entropy;
    entropy.run_gradient(g, &entropies, 0);
    for (std::size_t r = 0; r < 4; ++r) {
      const double counts = labels[r] == -100 ? 0 : g[r];
      const double e = relative_bound(want[r].largest, map) * std::fabs(counts) * map.scale;
      for (std::size_t i = 0; i < width; ++i) {
        const double w = counts * want[r].gradient[first + i];
        ASSERT_LE(std::fabs(to_float(slice.logits[r * width + i]) - w),
                  4 * e + to_t<TypeParam>() * std::fabs(w) + kTiny);
      }
      for (std::size_t i = 0; i < count; ++i) {
        const double w = counts * want[r].entropy_gradient[i];
        // log p + entropy is as large as 2 A + log V.
        ASSERT_LE(std::fabs(to_float(entropy.logits[r * count + i]) - w),
                  4 * e * (2 * want[r].largest + 8) + to_t<TypeParam>() * std::fabs(w) + kTiny);
      }
    }
  }
}

TYPED_TEST(GpuLoss, IgnoredAndWrongLabels) {
  Rows<TypeParam> rows(4, 50, 2, {1, 0}, 6);
  rows.labels = {-100, 50, -1, 49};
  rows.run(true, true, Order::kScattered);
  EXPECT_EQ(rows.loss[0], 0.0f);
  EXPECT_EQ(rows.lse[0], 0.0f);
  EXPECT_EQ(rows.entropy[0], 0.0f);
  for (std::size_t i = 0; i < 50; ++i) {
    EXPECT_EQ(to_float(rows.logits[i]), 0.0f);
    EXPECT_TRUE(std::isnan(to_float(rows.logits[50 + i])));
    EXPECT_TRUE(std::isnan(to_float(rows.logits[100 + i])));
  }
  EXPECT_TRUE(std::isnan(rows.loss[1]) && std::isnan(rows.lse[2]) && std::isfinite(rows.loss[3]));
}

// As torch's cross_entropy: NaN and +inf make the row NaN, -inf is a probability of 0.
TYPED_TEST(GpuLoss, NonFiniteLogits) {
  for (const std::size_t place : {3u, 299u}) {
    Rows<TypeParam> rows(4, 300, 2, {1, 0}, 7);
    rows.labels = {5, 5, 5, static_cast<std::int64_t>(place)};
    rows.logits[place] = from_float<TypeParam>(NAN);
    rows.logits[300 + place] = from_float<TypeParam>(kInf);
    rows.logits[600 + place] = from_float<TypeParam>(-kInf);
    rows.logits[900 + place] = from_float<TypeParam>(-kInf);
    const std::vector<TypeParam> logits = rows.logits;
    rows.run(true, true, Order::kAscending);
    EXPECT_TRUE(std::isnan(rows.loss[0]) && std::isnan(rows.loss[1]));
    EXPECT_TRUE(std::isnan(to_float(rows.logits[0])) && std::isnan(to_float(rows.logits[300])));
    const Reference want(&logits[600], 300, 5, {1, 0});
    EXPECT_NEAR(rows.loss[2], want.loss, 1e-4);
    EXPECT_NEAR(rows.entropy[2], want.entropy, 1e-3);
    EXPECT_EQ(to_float(rows.logits[600 + place]), 0.0f);
    EXPECT_EQ(rows.loss[3], kInf);
  }
}

}  // namespace
}  // namespace monograph::gpu
