// What the encoders of Q4_K, Q5_K and Q6_K share: four floats that every x86-64 and AArch64 has as
// one register, so that the order of additions is fixed; the nearest code; a unit in fp16.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "monograph/base/float_types.h"

namespace monograph::gguf {

inline constexpr std::size_t kLanes = 4;
using Lanes = float __attribute__((vector_size(16)));

inline Lanes load(const float* x) {
  Lanes lanes;
  std::memcpy(&lanes, x, sizeof lanes);
  return lanes;
}
inline Lanes all(float x) { return Lanes{x, x, x, x}; }
inline float total(Lanes lanes) { return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]); }
inline Lanes smaller(Lanes a, Lanes b) { return a < b ? a : b; }
inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

// The whole numbers from `low` to `high` that are nearest, ties to even; between -2^22 and 2^22.
inline Lanes nearest_code(Lanes x, Lanes low, Lanes high) {
  const Lanes shift = all(12582912);
  return (smaller(larger(x, low), high) + shift) - shift;
}

// 1 / x, or 0 where that is not finite: a scale of 0, or one so small that every code is 0.
inline Lanes inverse_of(Lanes x) {
  const Lanes exact = 1 / x, most = all(std::numeric_limits<float>::max());
  return ((exact <= most) & (exact >= -most)) ? exact : all(0);
}
inline float inverse_of(float x) { return inverse_of(all(x))[0]; }
inline float nearest_code(float x, float low, float high) {
  return nearest_code(all(x), all(low), all(high))[0];
}

// An fp16 number for the unit of whole numbers up to `most`, the largest of which stands for
// `largest`: the nearest, or the next above where the largest would be lost otherwise.
inline Fp16 unit_of(float largest, float most) {
  Fp16 unit = from_float<Fp16>(std::min(largest / most, 65504.0f));
  if (to_float(unit) * (most + 0.5f) < largest && unit.bits < 0x7bff) ++unit.bits;
  return unit;
}

}  // namespace monograph::gguf
