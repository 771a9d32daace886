// What every variant's running softmax shares: its constants and the end of a row.
#pragma once

#include <cstddef>

#include "monograph/simd/lanes.h"

namespace monograph {

// The reference of a running softmax before the first key: finite, so that a masked score (-inf)
// minus it is -inf and not NaN, and far below any score.
inline constexpr float kNoScore = -1e30f;

// The reference moves only when a score exceeds it by this much in log2: probabilities then stay
// below 2^8, which fp32 sums and bf16 products hold as exactly as those below 1, and the
// accumulated output is rescaled once or twice per row instead of at every new maximum.
inline constexpr float kSlack = 8.f;

// Closes a row whose exponentials were taken against `peak` (log2) and sum to `sum`: adds the sink,
// writes the natural log-sum-exp and returns the factor of the output, 0 for a row that saw no key.
[[gnu::always_inline]] inline float close_row(float peak, float sum, const float* sinks,
                                              std::size_t head, float* lse) {
  if (sinks == nullptr) {
    *lse = sum == 0 ? -__builtin_inff() : (peak + __builtin_log2f(sum)) * kLn2;
    return sum == 0 ? 0.f : 1 / sum;
  }
  const float sink = sinks[head] * kLog2E;
  const float top = sum == 0 || sink > peak ? sink : peak;
  const float shrink = sum == 0 ? 0.f : __builtin_exp2f(peak - top);
  const float total = sum * shrink + __builtin_exp2f(sink - top);
  *lse = (top + __builtin_log2f(total)) * kLn2;
  return shrink / total;
}

}  // namespace monograph
