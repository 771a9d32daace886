// Every scale byte of the MX formats, against exact numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "monograph/formats/e8m0.h"

namespace monograph {
namespace {

TEST(E8m0, EveryByteIsItsPowerOfTwo) {
  for (int b = 0; b < 255; ++b) {
    const float value = e8m0_value(static_cast<std::uint8_t>(b));
    EXPECT_EQ(static_cast<double>(value), std::ldexp(1.0, b - 127)) << b;
    EXPECT_EQ(static_cast<double>(e8m0_reciprocal(static_cast<std::uint8_t>(b))),
              std::ldexp(1.0, 127 - b));
    EXPECT_EQ(e8m0_ceil(value), b);
    EXPECT_EQ(e8m0_ceil(std::nextafter(value, INFINITY)), std::min(b + 1, 254)) << b;
    EXPECT_EQ(e8m0_ceil(std::nextafter(value, 0.0f)), b) << b;
    EXPECT_EQ(e8m0_floor(value), b);
    EXPECT_EQ(e8m0_floor(std::nextafter(value, 0.0f)), std::max(b - 1, 0)) << b;
  }
  EXPECT_TRUE(std::isnan(e8m0_value(255)));
  EXPECT_EQ(std::bit_cast<std::uint32_t>(e8m0_value(0)), 0x00400000u);
  EXPECT_EQ(e8m0_ceil(0.0f), 0);
  EXPECT_EQ(e8m0_ceil(std::numeric_limits<float>::max()), 254);
}

}  // namespace
}  // namespace monograph
