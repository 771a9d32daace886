// Frequencies and angles against formulas in long double, written out for single pairs.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "monograph/base/float_types.h"
#include "monograph/kernels/rotary/angles.h"

namespace monograph {
namespace {

TEST(RotaryFrequencies, DefaultAndLinear) {
  for (const double theta : {10000.0, 500000.0, 1e6})
    for (const std::size_t size : {2, 16, 64, 96, 128}) {
      RopeScaling scaling = {RopeKind::kDefault, theta};
      const std::vector<float> plain = rotary_frequencies(scaling, size);
      ASSERT_EQ(plain.size(), size / 2);
      for (std::size_t i = 0; i < size / 2; ++i)
        EXPECT_FLOAT_EQ(plain[i],
                        static_cast<float>(std::pow(static_cast<long double>(theta),
                                                    -2.0L * static_cast<long double>(i) / size)));
      EXPECT_EQ(plain[0], 1.f);
      scaling.kind = RopeKind::kLinear;
      scaling.factor = 4;
      const std::vector<float> linear = rotary_frequencies(scaling, size);
      for (std::size_t i = 0; i < size / 2; ++i) EXPECT_EQ(linear[i], plain[i] / 4);
    }
}

// Llama 3.1's numbers: slow pairs turn 8 times slower, quick ones as before.
TEST(RotaryFrequencies, Llama3) {
  const RopeScaling scaling = {RopeKind::kLlama3, 500000, 8, 1, 4, 8192};
  const std::vector<float> found = rotary_frequencies(scaling, 128);
  bool between = false;
  for (std::size_t i = 0; i < 64; ++i) {
    const double plain = std::pow(500000.0, -2.0 * static_cast<double>(i) / 128);
    const double turns = 8192 * plain / (2 * M_PI);  // in the original positions
    if (turns > 4) {
      EXPECT_FLOAT_EQ(found[i], static_cast<float>(plain));
    } else if (turns < 1) {
      EXPECT_FLOAT_EQ(found[i], static_cast<float>(plain / 8));
    } else {
      between = true;
      const double share = (turns - 1) / 3;
      EXPECT_FLOAT_EQ(found[i], static_cast<float>(plain * (share + (1 - share) / 8)));
    }
  }
  EXPECT_TRUE(between);
}

TEST(RotaryFrequencies, YarnIsARampBetweenBoth) {
  for (const bool truncate : {true, false}) {
    RopeScaling scaling = {RopeKind::kYarn, 1e6};
    scaling.factor = 4;
    scaling.original_positions = 32768;
    scaling.truncate = truncate;
    const std::vector<float> found = rotary_frequencies(scaling, 128);
    double before = 2;
    for (std::size_t i = 0; i < 64; ++i) {
      const double plain = std::pow(1e6, -2.0 * static_cast<double>(i) / 128);
      const double kept = (found[i] / plain - 0.25) / 0.75;
      EXPECT_LE(kept, before + 1e-6);
      before = kept;
      const double turns = 32768 * plain / (2 * M_PI);
      // Where it begins and ends, but for the pair that rounding moves it by.
      if (turns > 32 * 1.6) EXPECT_NEAR(kept, 1, 1e-6);
      if (turns < 1 / 1.6) EXPECT_NEAR(kept, 0, 1e-6);
    }
  }
}

template <class T>
void check_angles(double scale) {
  const std::vector<float> frequencies = rotary_frequencies({}, 20);
  const std::vector<std::int64_t> positions = {0, 1, 2, 77, 8191, 131071, 0, 5};
  const std::size_t tokens = positions.size();
  std::vector<T> cos(tokens * 20 + 1), sin(tokens * 20 + 1);
  ThreadPool pool(3);
  rotary_angles({dtype_of<T>, positions.data(), tokens, frequencies.data(), 10, scale, cos.data(),
                 sin.data()},
                [&](std::size_t n, std::size_t grain, ParallelBody body) {
                  pool.parallel_for(n, grain, body);
                });
  for (std::size_t t = 0; t < tokens; ++t)
    for (std::size_t i = 0; i < 20; ++i) {
      const float angle = static_cast<float>(positions[t]) * frequencies[i % 10];
      const T c = from_float<T>(static_cast<float>(std::cos(double(angle)) * scale));
      const T s = from_float<T>(static_cast<float>(std::sin(double(angle)) * scale));
      EXPECT_EQ(std::memcmp(&cos[t * 20 + i], &c, sizeof c), 0);
      EXPECT_EQ(std::memcmp(&sin[t * 20 + i], &s, sizeof s), 0);
    }
}

TEST(RotaryAngles, CosineAndSineOfTheAngleInFp64) {
  for (const double scale : {1.0, 1.1386294361119891}) {
    check_angles<float>(scale);
    check_angles<Bf16>(scale);
    check_angles<Fp16>(scale);
  }
}

}  // namespace
}  // namespace monograph
