// Every variant against Philox of one element at a time: sizes around blocks, every start, every
// type; parts of a tensor; what is not finite; threads.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/base/tests/random_elements.h"
#include "monograph/kernels/seeded_dropout/philox.h"
#include "monograph/kernels/seeded_dropout/seeded_dropout.h"

namespace monograph {
namespace {

constexpr std::uint64_t kSeed = 0x123456789ABCDEF0, kStream = 7;

template <class T>
T dropped(T x, std::uint64_t place, double probability) {
  const PhiloxWords words = mask_words(kSeed, kStream, place / 4);
  const bool keep = words.word[place % 4] < (1 - probability) * 0x1p32;
  const float value = keep ? to_float(x) : to_float(x) * 0.f;
  return from_float<T>(value / static_cast<float>(1 - probability));
}

template <class T>
bool same(T a, T b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(to_float(a)) && std::isnan(to_float(b)));
}

template <class T>
void check(DropoutFn* run, const std::vector<T>& x, std::uint64_t first, double probability,
           std::size_t begin, std::size_t end) {
  std::vector<T> out(x.size(), from_float<T>(9.f));
  run({dtype_of<T>, x.data(), out.data(), x.size(), first, kSeed, kStream, probability}, begin,
      end);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const T want =
        i < begin || i >= end ? from_float<T>(9.f) : dropped(x[i], first + i, probability);
    ASSERT_TRUE(same(out[i], want)) << i << " of " << x.size() << " from " << first;
  }
}

template <class Body>
void for_variants(Body body) {
  for (const auto& variant : seeded_dropout_variants())
    if (variant.isa <= best_isa())
      with_type(variant.dtype, [&]<class T>() { body.template operator()<T>(variant.run); });
}

TEST(SeededDropout, EverySizeFromEveryStart) {
  for_variants([]<class T>(DropoutFn* run) {
    for (const std::size_t size : {0, 1, 2, 3, 4, 5, 15, 16, 31, 32, 33, 67, 131}) {
      const std::vector<T> x = random_elements<T>(size, 3);
      for (std::size_t begin = 0; begin <= size; begin += size < 40 ? 1 : 13)
        check(run, x, 0, 0.3, begin, size);
      for (const std::uint64_t first : {1, 2, 3, 4, 30}) check(run, x, first, 0.3, size / 3, size);
    }
  });
}

TEST(SeededDropout, PlacesBeyondFourBillion) {
  for_variants([]<class T>(DropoutFn* run) {
    check(run, random_elements<T>(100, 1), (std::uint64_t{1} << 34) - 50, 0.5, 0, 100);
  });
}

TEST(SeededDropout, EveryProbability) {
  for_variants([]<class T>(DropoutFn* run) {
    const std::vector<T> x = random_elements<T>(200, 1);
    for (const double probability : {0.0, 1e-12, 0.1, 0.5, 0.9, 1 - 0x1p-40})
      check(run, x, 0, probability, 0, 200);
  });
}

TEST(SeededDropout, WhatIsNotFiniteStaysSeen) {
  for_variants([]<class T>(DropoutFn* run) {
    for (const float bad :
         {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      const std::vector<T> x(64, from_float<T>(bad));
      check(run, x, 0, 0.5, 0, 64);
    }
  });
}

// As a trainer that has a slice of the tokens calls it, and in place.
TEST(SeededDropout, PartsAndThreadsChangeNoBit) {
  std::vector<float> x = random_elements<float>(100'000, 5), whole(x.size()), parts(x.size());
  const auto problem = [&](float* out, std::size_t first, std::size_t count) {
    return DropoutProblem{DType::kFloat32, x.data() + first, out + first, count, first,
                          kSeed,           kStream,          0.2};
  };
  seeded_dropout(problem(whole.data(), 0, x.size()), serial_for);
  seeded_dropout(problem(parts.data(), 0, 33'333), serial_for);
  seeded_dropout(problem(parts.data(), 33'333, x.size() - 33'333), serial_for);
  EXPECT_EQ(whole, parts);
  ThreadPool pool(3);
  seeded_dropout(problem(x.data(), 0, x.size()),
                 [&](std::size_t n, std::size_t grain, ParallelBody body) {
                   pool.parallel_for(n, grain, body);
                 });
  EXPECT_EQ(whole, x);
}

TEST(SeededDropout, TheRightShareOfZeros) {
  const std::vector<float> x(1 << 17, 1.f);
  std::vector<float> out(x.size());
  seeded_dropout({DType::kFloat32, x.data(), out.data(), x.size(), 0, kSeed, kStream, 0.2},
                 serial_for);
  double zeros = 0;
  for (const float value : out) zeros += value == 0.f;
  // Five standard deviations of a binomial.
  EXPECT_NEAR(zeros / (1 << 17), 0.2, 5 * std::sqrt(0.2 * 0.8 / (1 << 17)));
}

}  // namespace
}  // namespace monograph
