// E8M0, the scale of the MX formats: byte b stands for 2^(b - 127), 255 for NaN. There is no zero
// and no sign. Byte 0 is 2^-127, a subnormal of fp32, so shifting the byte into the exponent is
// wrong for 0 and for 255.
#pragma once

#include <bit>
#include <cstdint>

namespace monograph {

inline constexpr std::uint8_t kE8m0NaN = 255;

[[gnu::always_inline]] constexpr float e8m0_value(std::uint8_t b) {
  const std::uint32_t shifted = static_cast<std::uint32_t>(b) << 23;
  const std::uint32_t finite = b == 0 ? 0x00400000u : shifted;
  return std::bit_cast<float>(b == kE8m0NaN ? 0x7fc00000u : finite);
}

// 1 / value for b < 255, exact: 2^127 for 0, the subnormal 2^-127 for 254.
[[gnu::always_inline]] constexpr float e8m0_reciprocal(std::uint8_t b) {
  return e8m0_value(static_cast<std::uint8_t>(254 - b));
}

[[gnu::always_inline]] constexpr std::uint8_t e8m0_clamped(std::int32_t biased) {
  return static_cast<std::uint8_t>(biased < 0 ? 0 : biased > 254 ? 254 : biased);
}

// The smallest power of two not below x >= 0, at least 2^-127.
[[gnu::always_inline]] constexpr std::uint8_t e8m0_ceil(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t mantissa = bits & 0x7fffff;
  const std::uint32_t exponent = bits >> 23;
  if (exponent == 0) return mantissa > 0x400000 ? 1 : 0;
  return e8m0_clamped(static_cast<std::int32_t>(exponent + (mantissa != 0 ? 1 : 0)));
}

// The largest power of two not above x > 0, at least 2^-127.
[[gnu::always_inline]] constexpr std::uint8_t e8m0_floor(float x) {
  return e8m0_clamped(static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(x) >> 23));
}

}  // namespace monograph
