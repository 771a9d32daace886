#include <algorithm>
#include <cmath>
#include <cstring>

#include "monograph/base/float_types.h"
#include "monograph/gguf/blocks.h"

namespace monograph::gguf {
namespace {

// Halves away from zero: x + 0.5 would round 0.49999997 up.
std::int8_t rounded(float x) {
  const float magnitude = std::fabs(x);
  const int whole = static_cast<int>(magnitude);
  const int nearest = whole + (magnitude - static_cast<float>(whole) >= 0.5f ? 1 : 0);
  return static_cast<std::int8_t>(x < 0 ? -nearest : nearest);
}

}  // namespace

void encode_q8_0(const float* values, std::size_t blocks, std::uint8_t* out) {
  for (std::size_t block = 0; block < blocks; ++block, values += kBlock, out += 2 + kBlock) {
    float absmax = 0;
    for (std::size_t i = 0; i < kBlock; ++i) absmax = std::max(absmax, std::fabs(values[i]));
    const float scale = absmax / 127;
    const float exact = scale == 0 ? 0 : 1 / scale;
    const float inverse = std::isfinite(exact) ? exact : 0;
    const Fp16 stored = from_float<Fp16>(scale);
    std::memcpy(out, &stored, sizeof stored);
    for (std::size_t i = 0; i < kBlock; ++i) {
      out[2 + i] = static_cast<std::uint8_t>(rounded(values[i] * inverse));
    }
  }
}

}  // namespace monograph::gguf
