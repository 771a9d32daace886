// Scalar float conversions, exhaustively where the domain allows, against arithmetic in double.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "monograph/base/float_types.h"

namespace monograph {
namespace {

// The 16-bit float with `mantissa` stored bits and this exponent bias that is nearest to x, ties to
// even: scan by magnitude in double.
double half_value(std::uint32_t bits, int mantissa, int bias) {
  const int exponent = static_cast<int>(bits >> mantissa);
  const double fraction = static_cast<double>(bits & ((1u << mantissa) - 1)) / (1 << mantissa);
  return exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
}

TEST(FloatTypes, EveryFp16DecodesToItsValue) {
  for (std::uint32_t u = 0; u < 0x7c00; ++u) {
    const double want = half_value(u, 10, 15);
    EXPECT_EQ(to_float(Fp16{static_cast<std::uint16_t>(u)}), want);
    EXPECT_EQ(to_float(Fp16{static_cast<std::uint16_t>(u | 0x8000)}), -want);
  }
  EXPECT_EQ(to_float(Fp16{0x7c00}), std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(to_float(Fp16{0x7c01})));
}

TEST(FloatTypes, EveryBf16RoundTrips) {
  for (std::uint32_t u = 0; u < 0x10000; ++u) {
    const Bf16 x{static_cast<std::uint16_t>(u)};
    const Bf16 back = from_float<Bf16>(to_float(x));
    if (std::isnan(to_float(x)))
      EXPECT_EQ(back.bits, 0x7fc0);
    else
      EXPECT_EQ(back.bits, x.bits);
  }
}

// Between each pair of neighbours: below the midpoint goes down, above goes up, the midpoint to
// even.
template <class T>
void check_rounding(std::uint32_t largest) {
  for (std::uint32_t u = 0; u < largest; ++u) {
    const float low = to_float(T{static_cast<std::uint16_t>(u)});
    const float high = to_float(T{static_cast<std::uint16_t>(u + 1)});
    const double exact = (static_cast<double>(low) + static_cast<double>(high)) / 2;
    const float middle = static_cast<float>(exact);
    if (static_cast<double>(middle) != exact) continue;  // below fp32's own resolution
    const std::uint32_t even = u % 2 == 0 ? u : u + 1;
    ASSERT_EQ(from_float<T>(middle).bits, even) << u;
    ASSERT_EQ(from_float<T>(std::nextafter(middle, -1.0f)).bits, u) << u;
    ASSERT_EQ(from_float<T>(std::nextafter(middle, std::numeric_limits<float>::infinity())).bits,
              u + 1)
        << u;
    ASSERT_EQ(from_float<T>(-middle).bits, even | 0x8000) << u;
  }
}

TEST(FloatTypes, Bf16RoundsToNearestEvenSubnormalsIncluded) { check_rounding<Bf16>(0x7f7f); }
TEST(FloatTypes, Fp16RoundsToNearestEvenSubnormalsIncluded) { check_rounding<Fp16>(0x7bff); }

TEST(FloatTypes, OverflowGoesToInfinity) {
  EXPECT_EQ(from_float<Fp16>(65519.996f).bits, 0x7bff);
  EXPECT_EQ(from_float<Fp16>(65520.0f).bits, 0x7c00);
  EXPECT_EQ(from_float<Fp16>(-1e9f).bits, 0xfc00);
  EXPECT_EQ(from_float<Bf16>(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(from_float<Fp16>(std::numeric_limits<float>::infinity()).bits, 0x7c00);
}

}  // namespace
}  // namespace monograph
