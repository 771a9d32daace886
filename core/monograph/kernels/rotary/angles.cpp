#include "monograph/kernels/rotary/angles.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "monograph/base/float_types.h"

namespace monograph {
namespace {

double llama3(const RopeScaling& s, double frequency) {
  const double turn = 2 * std::numbers::pi / frequency;  // in tokens
  if (turn > s.original_positions / s.low_frequency) return frequency / s.factor;
  if (turn < s.original_positions / s.high_frequency) return frequency;
  const double share =
      (s.original_positions / turn - s.low_frequency) / (s.high_frequency - s.low_frequency);
  return (1 - share) * frequency / s.factor + share * frequency;
}

// The pair that makes so many turns in the original positions.
double pair_of_turns(const RopeScaling& s, double turns, double size) {
  return size * std::log(s.original_positions / (turns * 2 * std::numbers::pi)) /
         (2 * std::log(s.theta));
}

double yarn(const RopeScaling& s, double frequency, double pair, double size) {
  double low = pair_of_turns(s, s.beta_fast, size), high = pair_of_turns(s, s.beta_slow, size);
  if (s.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, size - 1);
  if (low == high) high += 0.001;
  const double kept = 1 - std::clamp((pair - low) / (high - low), 0.0, 1.0);
  return frequency / s.factor * (1 - kept) + frequency * kept;
}

double frequency_of(const RopeScaling& s, std::size_t pair, std::size_t size) {
  const double plain =
      1 / std::pow(s.theta, static_cast<double>(2 * pair) / static_cast<double>(size));
  switch (s.kind) {
    case RopeKind::kLinear:
      return plain / s.factor;
    case RopeKind::kLlama3:
      return llama3(s, plain);
    case RopeKind::kYarn:
      return yarn(s, plain, static_cast<double>(pair), static_cast<double>(size));
    case RopeKind::kDefault:
      break;
  }
  return plain;
}

template <class T>
void turn_tokens(const RotaryAngles& job, std::size_t begin, std::size_t end) {
  T* const cos = static_cast<T*>(job.cos);
  T* const sin = static_cast<T*>(job.sin);
  for (std::size_t t = begin; t < end; ++t) {
    const auto position = static_cast<float>(job.positions[t]);
    for (std::size_t i = 0; i < job.half; ++i) {
      const double angle = position * job.frequencies[i];
      const std::size_t first = 2 * t * job.half + i, second = first + job.half;
      cos[first] = cos[second] = from_float<T>(static_cast<float>(std::cos(angle) * job.scaling));
      sin[first] = sin[second] = from_float<T>(static_cast<float>(std::sin(angle) * job.scaling));
    }
  }
}

}  // namespace

std::vector<float> rotary_frequencies(const RopeScaling& scaling, std::size_t size) {
  std::vector<float> found;
  for (std::size_t pair = 0; pair < size / 2; ++pair)
    found.push_back(static_cast<float>(frequency_of(scaling, pair, size)));
  return found;
}

void rotary_angles(const RotaryAngles& job, ParallelFor parallel_for) {
  // A cosine and a sine take some 30 nanoseconds.
  const std::size_t grain = std::max<std::size_t>(512 / std::max<std::size_t>(job.half, 1), 1);
  parallel_for(job.tokens, grain, [&](std::size_t begin, std::size_t end) {
    with_type(job.dtype, [&]<class T>() { turn_tokens<T>(job, begin, end); });
  });
}

}  // namespace monograph
