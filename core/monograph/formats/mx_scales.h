// How an MX block gets its power of two: E8M0 byte b, elements x * 2^(127 - b), exact.
// With m the largest magnitude of the block, `largest` the largest element (6 or 448) and e the
// exponent of the largest power of two among elements (2 or 8):
//   floor   floor(log2 m) - e. The OCP standard's minimum and torchao's default. Elements between
//           largest and 2^(e + 1) saturate.
//   ceil    the same rounded up unless m is a power of two. Never saturates.
//   even    m is rounded to the element's precision first: up from 1.75 * 2^k for E2M1 and from
//           1.9375 * 2^k for E4M3. As torchao EVEN and, for E2M1, compressed-tensors.
//   rceil   the smallest power of two not below m / largest. As torchao RCEIL and ModelOpt mean it.
//           Never saturates.
//   transformer-engine   rceil with m * (1 / largest), both rounded to fp32.
//   compressed-tensors   even with E2M1's constant whatever the element.
// The byte is clamped to 0 ... 254. A block of zeros has byte 0.
#pragma once

#include <bit>
#include <cstdint>

#include "monograph/base/minifloat.h"
#include "monograph/formats/e8m0.h"
#include "monograph/formats/format.h"

namespace monograph {

template <class E>
[[gnu::always_inline]] inline std::uint8_t mx_scale(ScaleRule rule, float absmax) {
  constexpr std::int32_t kExponent =
      static_cast<std::int32_t>(E::kLargestCode >> E::kMantissa) - E::kBias;
  constexpr float kLargestValue = E::decode(E::kLargestCode);
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(absmax);
  const auto rounded_up_from = [&](int mantissa) __attribute__((always_inline)) {
    const std::uint32_t half = 1u << (23 - mantissa - 1);
    return e8m0_clamped(static_cast<std::int32_t>((bits + half) >> 23) - kExponent);
  };
  switch (rule) {
    case ScaleRule::kFloor:
      return e8m0_clamped(static_cast<std::int32_t>(bits >> 23) - kExponent);
    case ScaleRule::kCeil:
      return e8m0_clamped(static_cast<std::int32_t>((bits + 0x7fffff) >> 23) - kExponent);
    case ScaleRule::kEven:
      return rounded_up_from(E::kMantissa);
    case ScaleRule::kCompressedTensors:
      return rounded_up_from(E2m1::kMantissa);
    case ScaleRule::kTransformerEngine:
      return e8m0_ceil(absmax * (1.0f / kLargestValue));
    default:
      return e8m0_ceil(absmax / kLargestValue);
  }
}

}  // namespace monograph
