// Which token comes next. With a temperature of 0 the likeliest, of equal ones the one with the
// lowest id. Else by chance:
//   p[i]   = exp((logits[i] - largest) / temperature)                 fp64
//   kept   = the fewest tokens, largest logit first, of equal ones the lowest id first, whose p
//            reach top_p * (sum of all p, by id)
//   chosen = the first of them, in that order, whose running sum exceeds u * (sum of the kept)
// u has 53 bits of Philox (kernels/seeded_dropout/philox.h) of the seed at the token's position:
// the same seed and logits give the same token, whatever was drawn before.
#pragma once

#include <cstdint>
#include <span>

namespace monograph::train {

struct Sampling {
  double temperature = 0;  // 0 or more
  double top_p = 1;        // above 0, at most 1
  std::uint64_t seed = 0;
};

// The uniform number in [0, 1) of a position.
double uniform(std::uint64_t seed, std::uint64_t position);

// Throws Error if a logit is not finite, or a setting is outside its range.
std::int64_t choose_token(std::span<const float> logits, const Sampling& sampling,
                          std::uint64_t position);

}  // namespace monograph::train
