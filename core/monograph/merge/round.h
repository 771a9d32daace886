// fp64 to the types of weights, rounded once.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "monograph/base/float_types.h"

namespace monograph {

// The fp32 value next to x towards zero, its last bit set if that is not x itself: rounding the
// result to a type of fewer bits gives what rounding x would. Plain conversion to fp32 first would
// round twice and be wrong near ties.
inline float round_to_odd(double x) {
  const auto nearest = static_cast<float>(x);
  if (static_cast<double>(nearest) == x || std::isnan(x)) return nearest;
  std::uint32_t bits = std::bit_cast<std::uint32_t>(nearest);
  if (std::fabs(static_cast<double>(nearest)) > std::fabs(x)) --bits;
  return std::bit_cast<float>(bits | 1);
}

// To nearest, ties to even, subnormals kept, overflow to infinity.
template <class T>
T round_to(double x) {
  return from_float<T>(round_to_odd(x));
}
template <>
inline float round_to<float>(double x) {
  return static_cast<float>(x);
}

}  // namespace monograph
