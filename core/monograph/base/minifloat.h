// Floating-point numbers of 4 and 8 bits: sign, exponent, mantissa; subnormals, no hidden flags.
//   E2M1  0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives (code 8 is -0); no infinity, no NaN
//   E4M3  as in torch's float8_e4m3fn: largest 448, smallest 2^-9, 0x7f and 0xff are NaN, no
//         infinity
//   E5M2  largest 57344, smallest 2^-16, 0x7c infinity, 0x7d-0x7f NaN
// Decoding is exact: each value is an fp32 number. Encoding rounds to nearest even and saturates:
// what lies beyond the largest finite value, infinity included, becomes that value. The sign of a
// zero is kept.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace monograph {

// 2^k for normal results.
constexpr float power_of_two(int k) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(127 + k) << 23);
}

template <int kExponentBits, int kMantissaBits, std::uint32_t kLargest>
struct Minifloat {
  static constexpr int kMantissa = kMantissaBits;
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr std::uint32_t kSignCode = 1u << (kExponentBits + kMantissaBits);
  static constexpr std::uint32_t kLargestCode = kLargest;  // of the largest finite value
  static constexpr std::uint32_t kMagnitudes = kSignCode - 1;
  // Between neighbours below kSmallestNormal.
  static constexpr float kStep = power_of_two(1 - kBias - kMantissa);
  static constexpr float kSmallestNormal = power_of_two(1 - kBias);
  // Adding this to a magnitude below kSmallestNormal leaves its code, rounded to even, in the low
  // bits.
  static constexpr float kAligned = power_of_two(23 + 1 - kBias - kMantissa);

  // NaN codes of either sign give the same NaN.
  [[gnu::always_inline]] static constexpr float decode(std::uint32_t code) {
    const std::uint32_t magnitude = code & kMagnitudes;
    if (magnitude > kLargestCode) {
      const bool infinite = kExponentBits == 5 && magnitude == kLargestCode + 1;
      if (!infinite) return std::bit_cast<float>(0x7fc00000u);
      return std::bit_cast<float>((code & kSignCode) != 0 ? 0xff800000u : 0x7f800000u);
    }
    const int exponent = static_cast<int>(magnitude >> kMantissa);
    const std::uint32_t mantissa = magnitude & ((1u << kMantissa) - 1);
    const float value = exponent == 0 ? static_cast<float>(mantissa) * kStep
                                      : static_cast<float>(mantissa | 1u << kMantissa) *
                                            power_of_two(exponent - kBias - kMantissa);
    return (code & kSignCode) != 0 ? -value : value;
  }

  // `x` is not NaN.
  [[gnu::always_inline]] static constexpr std::uint32_t encode(float x) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t a = bits & 0x7fffffff;
    const std::uint32_t sign = bits >> 31 != 0 ? kSignCode : 0;
    std::uint32_t code;
    if (std::bit_cast<float>(a) < kSmallestNormal) {
      code = std::bit_cast<std::uint32_t>(std::bit_cast<float>(a) + kAligned) -
             std::bit_cast<std::uint32_t>(kAligned);
    } else {
      constexpr int kDropped = 23 - kMantissa;
      const std::uint32_t half = (1u << (kDropped - 1)) - 1 + (a >> kDropped & 1);
      code = ((a + half) >> kDropped) - (static_cast<std::uint32_t>(127 - kBias) << kMantissa);
    }
    return sign | (code < kLargestCode ? code : kLargestCode);
  }
};

// The values of all codes.
template <class E, std::size_t kCodes>
struct MinifloatTable {
  float values[kCodes];
  constexpr MinifloatTable() : values{} {
    for (std::uint32_t code = 0; code < kCodes; ++code) values[code] = E::decode(code);
  }
};

using E2m1 = Minifloat<2, 1, 0x07>;
using E4m3 = Minifloat<4, 3, 0x7e>;
using E5m2 = Minifloat<5, 2, 0x7b>;
inline constexpr MinifloatTable<E4m3, 256> kE4m3Values;

}  // namespace monograph
