#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "monograph/files/tests/temporary_folder.h"
#include "monograph/train/sampling.h"

namespace monograph::train {
namespace {

// Tokens in the order of their logits, and the probability of each that is kept.
struct Kept {
  std::vector<std::int64_t> ids;
  std::vector<double> p;
};

Kept kept_of(const std::vector<float>& logits, double temperature, double top_p) {
  std::vector<std::int64_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto logit = [&](std::int64_t id) { return logits[static_cast<std::size_t>(id)]; };
  std::stable_sort(ids.begin(), ids.end(), [&](auto a, auto b) { return logit(a) > logit(b); });
  long double all = 0, sum = 0;
  const auto weight = [&](std::int64_t id) {
    return std::exp(static_cast<long double>(logit(id) - logit(ids[0])) / temperature);
  };
  for (const std::int64_t id : ids) all += weight(id);
  Kept kept;
  for (const std::int64_t id : ids) {
    if (sum >= top_p * all) break;
    sum += weight(id);
    kept.ids.push_back(id);
  }
  for (const std::int64_t id : kept.ids) kept.p.push_back(static_cast<double>(weight(id) / sum));
  return kept;
}

TEST(Sampling, WithoutATemperatureTheLikeliestAndOfEqualsTheLowest) {
  EXPECT_EQ(choose_token(std::vector<float>{1, 5, -2, 5, 4}, {}, 3), 1);
  EXPECT_EQ(choose_token(std::vector<float>{0}, {}, 0), 0);
  EXPECT_EQ(choose_token(std::vector<float>{-3e38f, -0.0f, 0.0f}, {}, 0), 1);
}

TEST(Sampling, EveryTokenHasItsShare) {
  std::mt19937 engine(1);
  std::vector<float> logits;
  for (int i = 0; i < 40; ++i)  // some are equal
    logits.push_back(static_cast<float>(engine() % 24) / 5);
  constexpr int kDraws = 40000;
  for (const double temperature : {0.5, 1.0, 3.0})
    for (const double top_p : {0.03, 0.7, 1.0}) {
      const Kept kept = kept_of(logits, temperature, top_p);
      std::vector<int> seen(logits.size());
      for (std::uint64_t i = 0; i < kDraws; ++i)
        ++seen[static_cast<std::size_t>(choose_token(logits, {temperature, top_p, 9}, i))];
      int found = 0;
      for (std::size_t k = 0; k < kept.ids.size(); ++k) {
        const int count = seen[static_cast<std::size_t>(kept.ids[k])];
        found += count;
        const double p = kept.p[k], spread = std::sqrt(kDraws * p * (1 - p));
        EXPECT_NEAR(count, kDraws * p, 5 * spread + 1e-9) << kept.ids[k];
      }
      EXPECT_EQ(found, kDraws) << "a token that is not kept was drawn";
    }
}

TEST(Sampling, TheTokenIsTheOneWhoseShareHoldsTheNumber) {
  const std::vector<float> logits = {0.5f, 2, -1, 2, 1.5f};
  const Sampling sampling = {0.8, 0.9, 11};
  const Kept kept = kept_of(logits, sampling.temperature, sampling.top_p);
  for (std::uint64_t position = 0; position < 2000; ++position) {
    double sum = 0;
    std::size_t at = 0;
    while (at + 1 < kept.p.size() && (sum += kept.p[at]) <= uniform(11, position)) ++at;
    EXPECT_EQ(choose_token(logits, sampling, position), kept.ids[at]) << position;
  }
}

TEST(Sampling, NumbersDependOnSeedAndPositionAlone) {
  double sum = 0;
  for (std::uint64_t i = 0; i < 10000; ++i) {
    const double u = uniform(5, i);
    EXPECT_TRUE(u >= 0 && u < 1);
    EXPECT_EQ(u, uniform(5, i));
    EXPECT_NE(u, uniform(6, i));
    EXPECT_NE(u, uniform(5, i + 1));
    sum += u;
  }
  EXPECT_NEAR(sum / 10000, 0.5, 5 * std::sqrt(1.0 / 12 / 10000));
}

TEST(Sampling, ExtremesAreNoTrouble) {
  const std::vector<float> far = {-3e38f, 3e38f, 0};
  for (std::uint64_t i = 0; i < 50; ++i) {
    EXPECT_EQ(choose_token(far, {1, 1, 0}, i), 1);
    EXPECT_EQ(choose_token(far, {1e-300, 1, 0}, i), 1);
    EXPECT_LT(choose_token(far, {1e300, 1, 0}, i), 3);
    EXPECT_EQ(choose_token(std::vector<float>{1, 1}, {1, 1e-300, 0}, i), 0);
  }
}

std::string error(const std::vector<float>& logits, const Sampling& sampling) {
  return files::error_of([&] { choose_token(logits, sampling, 0); });
}

TEST(Sampling, WhatIsNoNumberIsNamed) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_NE(error({0, nan}, {}).find("the logit of token 1 is"), std::string::npos);
  EXPECT_EQ(error({infinity, 0}, {}), "the logit of token 0 is inf, wanted a finite number");
  EXPECT_NE(error({}, {}).find("no logits"), std::string::npos);
  EXPECT_NE(error({1}, {-1.0, 1, 0}).find("temperature is -1"), std::string::npos);
  EXPECT_NE(error({1}, {nan, 1, 0}).find("temperature is"), std::string::npos);
  EXPECT_NE(error({1}, {1, 0, 0}).find("top_p is 0"), std::string::npos);
  EXPECT_NE(error({1}, {1, 1.5, 0}).find("top_p is 1.5"), std::string::npos);
}

}  // namespace
}  // namespace monograph::train
