// How an element is divided by its block's scale before it is rounded to a code.
#pragma once

#include <bit>
#include <cstdint>

namespace monograph {

// v = x * factor or x / factor, rounded to fp32, then v + zero. Adding -0 changes nothing; adding
// +0 drops the sign of a zero, as producers do that look at v < 0 instead of the sign bit.
struct Scaling {
  float factor = 1.0f;
  bool divide = false;
  float zero = -0.0f;
  float inverse = 0.0f;  // 1 / factor, rounded, where a division may be made of it; else 0
};

// Fills in `inverse` for a division whose every step is then a normal number. A mantissa of ones
// alone is left out: from its inverse the last bit cannot be told.
[[gnu::always_inline]] inline void with_inverse(Scaling& scaling) {
  constexpr std::uint32_t kMantissa = 0x7fffff;
  const bool usable = scaling.factor >= 0x1p-60f && scaling.factor <= 0x1p60f &&
                      (std::bit_cast<std::uint32_t>(scaling.factor) & kMantissa) != kMantissa;
  scaling.inverse = usable ? 1.0f / scaling.factor : 0.0f;
}

}  // namespace monograph
