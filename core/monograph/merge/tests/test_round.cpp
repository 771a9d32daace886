#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "monograph/merge/round.h"

namespace monograph {
namespace {

// Every value of a 16-bit type, the middle between it and the next one, and the two doubles beside
// the middle: nearest, ties to even.
template <class T>
void check_all() {
  const auto value_of = [](std::uint32_t bits) {
    return static_cast<double>(to_float(T{static_cast<std::uint16_t>(bits)}));
  };
  for (std::uint32_t bits = 0; std::isfinite(value_of(bits + 1)); ++bits) {
    const double here = value_of(bits), next = value_of(bits + 1), middle = (here + next) / 2;
    const std::uint32_t even = bits + (bits & 1);
    for (const double sign : {1.0, -1.0}) {
      const std::uint32_t s = sign < 0 ? 0x8000 : 0;
      ASSERT_EQ(round_to<T>(sign * here).bits, bits | s);
      ASSERT_EQ(round_to<T>(sign * middle).bits, even | s) << bits;
      ASSERT_EQ(round_to<T>(sign * std::nextafter(middle, 0.0)).bits, bits | s) << bits;
      ASSERT_EQ(round_to<T>(sign * std::nextafter(middle, next)).bits, (bits + 1) | s) << bits;
    }
  }
}

TEST(Round, EveryBf16AndEveryMiddle) { check_all<Bf16>(); }
TEST(Round, EveryFp16AndEveryMiddle) { check_all<Fp16>(); }

TEST(Round, OverflowAndNothing) {
  EXPECT_EQ(round_to<Bf16>(1e300).bits, 0x7f80);
  EXPECT_EQ(round_to<Bf16>(-1e300).bits, 0xff80);
  EXPECT_EQ(round_to<Bf16>(3.4028234663852886e38).bits, 0x7f80);  // the largest fp32
  EXPECT_EQ(round_to<Fp16>(65519.999999999).bits, 0x7bff);
  EXPECT_EQ(round_to<Fp16>(65520.0).bits, 0x7c00);
  EXPECT_EQ(round_to<Bf16>(1e-320).bits, 0);
  EXPECT_EQ(round_to<Fp16>(-1e-320).bits, 0x8000);
  EXPECT_TRUE(std::isnan(to_float(round_to<Bf16>(std::numeric_limits<double>::quiet_NaN()))));
}

}  // namespace
}  // namespace monograph
