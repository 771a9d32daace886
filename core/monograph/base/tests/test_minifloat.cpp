// Every code and every rounding boundary of the small floating-point types, against exact numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "monograph/base/minifloat.h"

namespace monograph {
namespace {

// The value of a code by the definition of the type, exact in double.
double exact(int exponent_bits, int mantissa_bits, unsigned code) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(code >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = static_cast<int>(code) & ((1 << mantissa_bits) - 1);
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                    : std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
  return (code >> (exponent_bits + mantissa_bits) & 1) != 0 ? -magnitude : magnitude;
}

template <class E>
void check_decode(int exponent_bits, std::vector<unsigned> nans, std::vector<unsigned> infinities) {
  for (unsigned code = 0; code < 2 * E::kSignCode; ++code) {
    const unsigned magnitude = code & (E::kSignCode - 1);
    const float got = E::decode(code);
    if (std::find(nans.begin(), nans.end(), magnitude) != nans.end()) {
      EXPECT_EQ(std::bit_cast<std::uint32_t>(got), 0x7fc00000u) << code;
    } else if (std::find(infinities.begin(), infinities.end(), magnitude) != infinities.end()) {
      EXPECT_EQ(got, magnitude == code ? INFINITY : -INFINITY) << code;
    } else {
      EXPECT_EQ(static_cast<double>(got), exact(exponent_bits, E::kMantissa, code)) << code;
      EXPECT_EQ(std::signbit(got), code >= E::kSignCode) << code;
    }
  }
}

TEST(Minifloat, EveryCodeDecodesToItsValue) {
  check_decode<E2m1>(2, {}, {});
  check_decode<E4m3>(4, {0x7f}, {});
  check_decode<E5m2>(5, {0x7d, 0x7e, 0x7f}, {0x7c});
  EXPECT_EQ(E2m1::decode(7), 6.0f);
  EXPECT_EQ(E4m3::decode(0x7e), 448.0f);
  EXPECT_EQ(E5m2::decode(0x7b), 57344.0f);
}

// The nearest magnitude by a scan in double; a tie goes to the even code.
template <class E>
unsigned nearest(double x) {
  const double a = std::min(std::fabs(x), 2.0 * E::decode(E::kLargestCode));
  unsigned best = 0;
  for (unsigned code = 1; code <= E::kLargestCode; ++code) {
    const double d = std::fabs(E::decode(code) - a);
    const double b = std::fabs(E::decode(best) - a);
    if (d < b || (d == b && code % 2 == 0)) best = code;
  }
  return best | (std::signbit(x) ? E::kSignCode : 0);
}

template <class E>
void check_encode() {
  for (unsigned code = 0; code <= E::kLargestCode; ++code) {
    EXPECT_EQ(E::encode(E::decode(code)), code);
    EXPECT_EQ(E::encode(-E::decode(code)), code | E::kSignCode);
    // The midpoint to the next value, exact in fp32, and its two neighbours.
    if (code == E::kLargestCode) continue;
    const float middle = (E::decode(code) + E::decode(code + 1)) / 2;
    for (const float x : {std::nextafter(middle, 0.0f), middle, std::nextafter(middle, 1e9f)}) {
      ASSERT_EQ(E::encode(x), nearest<E>(x)) << x;
      ASSERT_EQ(E::encode(-x), nearest<E>(-x)) << -x;
    }
  }
  for (std::uint32_t high = 0; high < 0x7f80; ++high) {  // every positive finite bf16
    const float x = std::bit_cast<float>(high << 16);
    ASSERT_EQ(E::encode(x), nearest<E>(x)) << x;
  }
  std::mt19937 random(1);
  for (int i = 0; i < 100000; ++i) {
    const float x = std::bit_cast<float>(static_cast<std::uint32_t>(random()) & 0xbfffffff);
    ASSERT_EQ(E::encode(x), nearest<E>(x)) << x;
  }
  EXPECT_EQ(E::encode(INFINITY), E::kLargestCode);
  EXPECT_EQ(E::encode(-3e38f), E::kLargestCode | E::kSignCode);
  EXPECT_EQ(E::encode(std::numeric_limits<float>::denorm_min()), 0u);
  EXPECT_EQ(E::encode(-0.0f), E::kSignCode);
}

TEST(Minifloat, EncodingTakesTheNearestWithTiesToEven) {
  check_encode<E2m1>();
  check_encode<E4m3>();
  check_encode<E5m2>();
}

}  // namespace
}  // namespace monograph
