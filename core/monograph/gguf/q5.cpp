// Q5_0 and Q5_1: for rows that are no multiple of 256 where K-quants were asked for.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "monograph/base/float_types.h"
#include "monograph/gguf/blocks.h"

namespace monograph::gguf {
namespace {

constexpr std::size_t kHalf = kBlock / 2;

// 32 codes of five bits: the fifth bits, then the nibbles.
void pack(const unsigned* codes, std::uint8_t* out) {
  std::uint32_t fifth = 0;
  for (std::size_t i = 0; i < kBlock; ++i) fifth |= (codes[i] >> 4) << i;
  std::memcpy(out, &fifth, sizeof fifth);
  for (std::size_t i = 0; i < kHalf; ++i) {
    out[4 + i] = static_cast<std::uint8_t>((codes[i] & 15) | (codes[i + kHalf] & 15) << 4);
  }
}

float inverse_of(float scale) {
  const float exact = scale == 0 ? 0 : 1 / scale;
  return std::isfinite(exact) ? exact : 0;
}

void store(float value, std::uint8_t* out) {
  const Fp16 half = from_float<Fp16>(value);
  std::memcpy(out, &half, sizeof half);
}

}  // namespace

void encode_q5_0(const float* values, std::size_t blocks, std::uint8_t* out) {
  for (; blocks > 0; --blocks, values += kBlock, out += 22) {
    float extreme = 0;
    for (std::size_t i = 0; i < kBlock; ++i) {
      if (std::fabs(values[i]) > std::fabs(extreme)) extreme = values[i];
    }
    const float scale = extreme / -16, inverse = inverse_of(scale);
    unsigned codes[kBlock];
    for (std::size_t i = 0; i < kBlock; ++i) {
      codes[i] = static_cast<unsigned>(std::min(31, static_cast<int>(values[i] * inverse + 16.5f)));
    }
    store(scale, out);
    pack(codes, out + 2);
  }
}

void encode_q5_1(const float* values, std::size_t blocks, std::uint8_t* out) {
  for (; blocks > 0; --blocks, values += kBlock, out += 24) {
    const auto [low, high] = std::minmax_element(values, values + kBlock);
    const float scale = (*high - *low) / 31, inverse = inverse_of(scale);
    unsigned codes[kBlock];
    for (std::size_t i = 0; i < kBlock; ++i) {
      codes[i] = static_cast<unsigned>(std::min(31.0f, (values[i] - *low) * inverse + 0.5f));
    }
    store(scale, out);
    store(*low, out + 2);
    pack(codes, out + 4);
  }
}

}  // namespace monograph::gguf
