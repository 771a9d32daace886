#include <algorithm>
#include <array>
#include <cmath>

#include "monograph/gguf/blocks.h"

namespace monograph::gguf {
namespace {

// log2 in fp32, as the reference has it: just below a power of two it rounds up to that.
std::uint32_t exponent_for(float absmax) {
  if (absmax == 0) return 0;
  return static_cast<std::uint32_t>(std::max(0.0f, std::floor(std::log2(absmax)) - 2 + 127));
}

unsigned nearest(float x, const std::array<float, 8>& magnitudes) {
  const float magnitude = std::fabs(x);
  unsigned best = 0;
  float least = magnitude;
  for (unsigned code = 1; code < 8; ++code) {
    const float error = std::fabs(magnitudes[code] - magnitude);
    best = error < least ? code : best;
    least = std::min(error, least);
  }
  return best != 0 && x < 0 ? best + 8 : best;
}

}  // namespace

void encode_mxfp4(const float* values, std::size_t blocks, std::uint8_t* out) {
  constexpr std::size_t kHalf = kBlock / 2;
  for (std::size_t block = 0; block < blocks; ++block, values += kBlock, out += 1 + kHalf) {
    float absmax = 0;
    for (std::size_t i = 0; i < kBlock; ++i) absmax = std::max(absmax, std::fabs(values[i]));
    const std::uint32_t exponent = exponent_for(absmax);
    std::array<float, 8> magnitudes;
    for (std::size_t code = 0; code < 8; ++code) {
      magnitudes[code] = kTwiceE2m1[code] * half_of_e8m0(exponent);
    }
    out[0] = static_cast<std::uint8_t>(exponent);
    for (std::size_t i = 0; i < kHalf; ++i) {
      out[1 + i] = static_cast<std::uint8_t>(nearest(values[i], magnitudes) |
                                             nearest(values[i + kHalf], magnitudes) << 4);
    }
  }
}

}  // namespace monograph::gguf
