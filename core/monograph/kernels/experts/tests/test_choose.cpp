// Routing against the formulas in fp64 from central differences and full sorts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/cpu/parallel.h"
#include "monograph/kernels/experts/choose.h"

namespace monograph {
namespace {

std::vector<float> drawn(std::size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> found(count);
  for (float& value : found) value = 2 * normal(engine);
  return found;
}

ChooseExperts problem_of(const std::vector<float>& logits, std::size_t tokens, std::size_t slots,
                         bool normalise) {
  const std::size_t experts = logits.size() / tokens;
  return {DType::kFloat32, {logits.data(), tokens, experts, experts}, slots, normalise};
}

// The weights of the given ids, straight from the definition.
std::vector<double> weights_of(const std::vector<double>& logits,
                               const std::vector<std::int64_t>& ids, bool normalise) {
  double all = 0, some = 0;
  for (const double z : logits) all += std::exp(z);
  for (const std::int64_t id : ids) some += std::exp(logits[static_cast<std::size_t>(id)]);
  std::vector<double> found;
  for (const std::int64_t id : ids)
    found.push_back(std::exp(logits[static_cast<std::size_t>(id)]) / (normalise ? some : all));
  return found;
}

TEST(ChooseExperts, TheLargestAndTheirShares) {
  constexpr std::size_t kTokens = 9, kExperts = 13;
  const std::vector<float> logits = drawn(kTokens * kExperts, 1);
  for (const std::size_t slots : {std::size_t{1}, std::size_t{4}, kExperts})
    for (const bool normalise : {false, true}) {
      std::vector<std::int64_t> ids(kTokens * slots);
      std::vector<float> weights(kTokens * slots);
      choose_experts(problem_of(logits, kTokens, slots, normalise), ids.data(), weights.data(),
                     serial_for);
      for (std::size_t t = 0; t < kTokens; ++t) {
        const std::vector<double> row(
            logits.begin() + static_cast<std::ptrdiff_t>(t * kExperts),
            logits.begin() + static_cast<std::ptrdiff_t>((t + 1) * kExperts));
        std::vector<std::int64_t> order(kExperts);
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
          return row[static_cast<std::size_t>(a)] > row[static_cast<std::size_t>(b)];
        });
        order.resize(slots);
        const std::vector<double> want = weights_of(row, order, normalise);
        for (std::size_t i = 0; i < slots; ++i) {
          EXPECT_EQ(ids[t * slots + i], order[i]);
          EXPECT_NEAR(static_cast<double>(weights[t * slots + i]), want[i], 0x1p-24 * want[i]);
        }
      }
    }
}

TEST(ChooseExperts, OfEqualsTheLowest) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> logits = {1, 3, 3, 1, 3, 2, 0, nan, 0, nan, 5, 0};
  std::vector<std::int64_t> ids(8);
  std::vector<float> weights(8);
  choose_experts(problem_of(logits, 2, 4, true), ids.data(), weights.data(), serial_for);
  EXPECT_EQ(ids, (std::vector<std::int64_t>{1, 2, 4, 5, 1, 3, 4, 0}));
  EXPECT_EQ(weights[0], weights[2]);
  for (std::size_t i = 4; i < 8; ++i) EXPECT_TRUE(std::isnan(weights[i]));
}

TEST(ChooseExperts, TheGradientIsThatOfDifferences) {
  constexpr std::size_t kTokens = 5, kExperts = 7, kSlots = 3;
  constexpr double kStep = 1e-5;
  const std::vector<float> logits = drawn(kTokens * kExperts, 2),
                           given = drawn(kTokens * kSlots, 3);
  for (const bool normalise : {false, true}) {
    const ChooseExperts problem = problem_of(logits, kTokens, kSlots, normalise);
    std::vector<std::int64_t> ids(kTokens * kSlots);
    std::vector<float> weights(kTokens * kSlots), found(logits.size());
    choose_experts(problem, ids.data(), weights.data(), serial_for);
    choose_experts_backward(problem, ids.data(), given.data(), found.data(), serial_for);
    for (std::size_t t = 0; t < kTokens; ++t) {
      const std::vector<std::int64_t> chosen(
          ids.begin() + static_cast<std::ptrdiff_t>(t * kSlots),
          ids.begin() + static_cast<std::ptrdiff_t>((t + 1) * kSlots));
      for (std::size_t j = 0; j < kExperts; ++j) {
        double slope = 0;
        for (const double sign : {1.0, -1.0}) {
          std::vector<double> row(logits.begin() + static_cast<std::ptrdiff_t>(t * kExperts),
                                  logits.begin() + static_cast<std::ptrdiff_t>((t + 1) * kExperts));
          row[j] += sign * kStep;
          const std::vector<double> w = weights_of(row, chosen, normalise);
          for (std::size_t i = 0; i < kSlots; ++i)
            slope += sign * static_cast<double>(given[t * kSlots + i]) * w[i] / (2 * kStep);
        }
        EXPECT_NEAR(static_cast<double>(found[t * kExperts + j]), slope, 1e-7);
      }
    }
  }
}

TEST(ChooseExperts, TheSameBitsForAnyNumberOfThreadsAndAnyNeighbours) {
  constexpr std::size_t kTokens = 700, kExperts = 60, kSlots = 8;
  const std::vector<float> logits = drawn(kTokens * kExperts, 4);
  const auto run = [&](const ChooseExperts& problem, ParallelFor parallel_for) {
    std::vector<std::int64_t> ids(problem.logits.rows * kSlots);
    std::vector<float> weights(ids.size());
    choose_experts(problem, ids.data(), weights.data(), parallel_for);
    return std::pair(ids, weights);
  };
  ThreadPool pool(3);
  const auto each = [&](std::size_t count, std::size_t grain, ParallelBody body) {
    pool.parallel_for(count, grain, body);
  };
  const ChooseExperts all = problem_of(logits, kTokens, kSlots, true);
  const auto [ids, weights] = run(all, serial_for);
  EXPECT_EQ(run(all, each), std::pair(ids, weights));
  ChooseExperts last = all;
  last.logits.data = logits.data() + (kTokens - 1) * kExperts;
  last.logits.rows = 1;
  const auto alone = run(last, serial_for);
  EXPECT_TRUE(std::equal(alone.first.begin(), alone.first.end(), ids.end() - kSlots));
  EXPECT_TRUE(std::equal(alone.second.begin(), alone.second.end(), weights.end() - kSlots));
}

}  // namespace
}  // namespace monograph
