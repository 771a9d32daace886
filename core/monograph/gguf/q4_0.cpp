#include <algorithm>
#include <cmath>
#include <cstring>

#include "monograph/base/float_types.h"
#include "monograph/gguf/blocks.h"

namespace monograph::gguf {

void encode_q4_0(const float* values, std::size_t blocks, std::uint8_t* out) {
  constexpr std::size_t kHalf = kBlock / 2;
  for (std::size_t block = 0; block < blocks; ++block, values += kBlock, out += 2 + kHalf) {
    float absmax = 0, extreme = 0;
    for (std::size_t i = 0; i < kBlock; ++i) {
      if (std::fabs(values[i]) <= absmax) continue;
      absmax = std::fabs(values[i]);
      extreme = values[i];
    }
    const float scale = extreme / -8;
    const float exact = scale == 0 ? 0 : 1 / scale;
    const float inverse = std::isfinite(exact) ? exact : 0;
    const Fp16 stored = from_float<Fp16>(scale);
    std::memcpy(out, &stored, sizeof stored);
    const auto code = [&](float x) {
      return static_cast<unsigned>(std::min(15, static_cast<int>(x * inverse + 8.5f)));
    };
    for (std::size_t i = 0; i < kHalf; ++i) {
      out[2 + i] = static_cast<std::uint8_t>(code(values[i]) | code(values[i + kHalf]) << 4);
    }
  }
}

}  // namespace monograph::gguf
