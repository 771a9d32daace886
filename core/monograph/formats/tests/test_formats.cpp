// The format table, the codebooks and double quantisation.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "monograph/formats/all.h"
#include "monograph/formats/dynamic_map.h"
#include "monograph/formats/format.h"

namespace monograph {
namespace {

TEST(Format, TheTableAndTheNamesAgree) {
  for (const FormatInfo& info : formats()) {
    EXPECT_EQ(find_format(info.format), &info);
    EXPECT_EQ(find_format(info.name), &info);
  }
  EXPECT_EQ(find_format("int3"), nullptr);
  EXPECT_EQ(find_format(static_cast<Format>(255)), nullptr);
}

TEST(Format, BlocksArePowersOfTwoWithinTheLimits) {  // requirement Q6
  const FormatInfo& nf4 = *find_format("nf4");
  for (const std::size_t good : {32, 64, 128, 256, 512, 1024, 2048, 4096})
    EXPECT_TRUE(block_fits(nf4, good)) << good;
  for (const std::size_t bad : {0, 1, 16, 31, 33, 48, 96, 8192})
    EXPECT_FALSE(block_fits(nf4, bad)) << bad;
}

TEST(Format, PackedBytesRoundUp) {
  const FormatInfo& nf4 = *find_format("nf4");
  EXPECT_EQ(packed_bytes(nf4, 0), 0u);
  EXPECT_EQ(packed_bytes(nf4, 1), 1u);
  EXPECT_EQ(packed_bytes(nf4, 2), 1u);
  EXPECT_EQ(packed_bytes(nf4, 3), 2u);
}

template <class F>
void check_order() {
  bool seen[16] = {};
  for (int i = 0; i < 16; ++i) {
    EXPECT_FALSE(seen[F::kOrder[i]]);
    seen[F::kOrder[i]] = true;
    if (i > 0) EXPECT_LE(F::kValues[F::kOrder[i - 1]], F::kValues[F::kOrder[i]]);
  }
}

TEST(Format, OrderSortsTheValues) {
  check_order<Nf4>();
  check_order<Fp4>();
}

TEST(Format, Fp4IsTheTableOverTwelve) {
  const double twelfths[16] = {0, .0625, 8, 12, 4, 6, 2, 3, -0, -.0625, -8, -12, -4, -6, -2, -3};
  for (int i = 0; i < 16; ++i) EXPECT_EQ(Fp4::kValues[i], static_cast<float>(twelfths[i] / 12));
}

TEST(DynamicMap, IsAscendingWithZeroAndOne) {
  for (int i = 1; i < 256; ++i) EXPECT_LT(kDynamicMap[i - 1], kDynamicMap[i]);
  EXPECT_EQ(kDynamicMap[255], 1.0f);
  EXPECT_EQ(kDynamicMap[127], 0.0f);
}

int nearest_by_scan(float x) {
  int best = 0;
  for (int i = 1; i < 256; ++i)
    if (std::fabs(static_cast<double>(x) - kDynamicMap[i]) <
        std::fabs(static_cast<double>(x) - kDynamicMap[best]))
      best = i;
  return best;
}

TEST(DynamicMap, NearestMatchesAScanAtEveryMidpointAndAround) {
  for (int i = 0; i < 256; ++i) EXPECT_EQ(nearest_dynamic_code(kDynamicMap[i]), i);
  for (int i = 1; i < 256; ++i) {
    const float middle = (kDynamicMap[i - 1] + kDynamicMap[i]) / 2;
    for (const float x : {std::nextafter(middle, -2.0f), middle, std::nextafter(middle, 2.0f)})
      EXPECT_EQ(nearest_dynamic_code(x), nearest_by_scan(x)) << i;
  }
  std::mt19937 random(7);
  std::uniform_real_distribution<float> uniform(-1.2f, 1.2f);
  for (int i = 0; i < 100000; ++i) {
    const float x = uniform(random);
    ASSERT_EQ(nearest_dynamic_code(x), nearest_by_scan(x)) << x;
  }
}

TEST(DoubleQuantize, ErrorStaysWithinHalfAStepOfTheGroup) {
  std::mt19937 random(11);
  std::uniform_real_distribution<float> uniform(0.001f, 3.0f);
  for (const std::size_t count : {0, 1, 2, 255, 256, 257, 1000}) {
    std::vector<float> scales(count), groups((count + 255) / 256);
    for (float& s : scales) s = uniform(random);
    std::vector<std::uint8_t> codes(count);
    float offset = -1;
    double_quantize(scales.data(), count, codes.data(), groups.data(), &offset, serial_for);
    double sum = 0;
    for (const float s : scales) sum += s;
    EXPECT_EQ(offset, count == 0 ? 0.0f : static_cast<float>(sum / static_cast<double>(count)));
    // The widest gap of the map is 0.0141: half of it, and a little for the roundings.
    for (std::size_t i = 0; i < count; ++i)
      EXPECT_NEAR(kDynamicMap[codes[i]] * groups[i / 256] + offset, scales[i],
                  0.0071 * groups[i / 256] + 1e-6);
  }
}

TEST(DoubleQuantize, EqualScalesComeBackExactly) {
  const std::vector<float> scales(300, 0.37f);
  std::vector<std::uint8_t> codes(300);
  float groups[2], offset;
  double_quantize(scales.data(), 300, codes.data(), groups, &offset, serial_for);
  for (std::size_t i = 0; i < 300; ++i)
    EXPECT_EQ(kDynamicMap[codes[i]] * groups[i / 256] + offset, 0.37f);
}

TEST(Format, TheLastRuleHasItsOwnName) {
  EXPECT_STREQ(name_of(ScaleRule::kModelOpt), "modelopt");
  EXPECT_STREQ(name_of(ScaleRule::kTransformers), "transformers");
}

}  // namespace
}  // namespace monograph
