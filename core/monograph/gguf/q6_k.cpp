// Q6_K: sixteen parts of 16 elements with a signed scale of eight bits each, by which codes from
// -32 to 31 are multiplied; the way of k_minimum.cpp without a minimum. Four parts are the lanes of
// a vector.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "monograph/gguf/blocks.h"
#include "monograph/gguf/k_groups.h"

namespace monograph::gguf {
namespace {

constexpr std::size_t kParts = 16, kPart = kSuperblock / kParts;
constexpr float kLow = -32, kHigh = 31, kMost = 127;
// Steps that are tried: the extreme element has the code -(32 + kFirst + i * kBetween).
constexpr int kSteps = 13;
constexpr float kFirst = -0.9f, kBetween = 0.15f;

// Element i of four parts.
using Parts = std::array<Lanes, kPart>;

struct Sums {
  Lanes qq{}, qx{};  // of the codes, and of codes times elements
};

Sums code_sums(const Parts& x, Lanes inverse) {
  Sums sums;
  for (const Lanes value : x) {
    const Lanes code = nearest_code(value * inverse, all(kLow), all(kHigh));
    sums.qq += code * code;
    sums.qx += code * value;
  }
  return sums;
}

// The scales with the least squared errors, of either sign.
Lanes best_scales(const Parts& x) {
  Lanes extreme{}, best{}, gained{};
  for (const Lanes value : x) extreme = value * value > extreme * extreme ? value : extreme;
  const auto attempt = [&](Lanes inverse) {
    const Sums sums = code_sums(x, inverse);
    const Lanes scale = sums.qq > 0 ? sums.qx / sums.qq : all(0);
    const Lanes gain = scale * sums.qx;
    best = gain > gained ? scale : best;
    gained = larger(gain, gained);
  };
  const Lanes inverse = inverse_of(extreme);
  for (int i = 0; i < kSteps; ++i) {
    attempt(all(kLow - kFirst - static_cast<float>(i) * kBetween) * inverse);
  }
  attempt(inverse_of(best));
  return best;
}

Lanes errors_of(const Parts& x, Lanes scale) {
  const Lanes inverse = inverse_of(scale);
  Lanes error{};
  for (const Lanes value : x) {
    const Lanes off = scale * nearest_code(value * inverse, all(kLow), all(kHigh)) - value;
    error += off * off;
  }
  return error;
}

constexpr std::size_t kQuarters = kParts / kLanes;
using Scales = std::array<Lanes, kQuarters>;  // part 4 i + j in lane j of quarter i

struct Block {
  Fp16 d{};
  Scales scales{};
  float error = 0;
};

// The eight bits of every part under the unit of `block`, around the ideal scales.
void choose_scales(const std::array<Parts, kQuarters>& x, const Scales& ideal, Block& block) {
  const Lanes d = all(to_float(block.d)), inverse = inverse_of(d);
  const Lanes low = all(-kMost - 1), high = all(kMost);
  block.error = 0;
  for (std::size_t i = 0; i < kQuarters; ++i) {
    Lanes least = all(std::numeric_limits<float>::infinity());
    const Lanes nearest = nearest_code(ideal[i] * inverse, low, high);
    for (const float more : {0.0f, -1.0f, 1.0f}) {
      const Lanes whole = smaller(larger(nearest + all(more), low), high);
      const Lanes error = errors_of(x[i], d * whole);
      block.scales[i] = error < least ? whole : block.scales[i];
      least = smaller(error, least);
    }
    block.error += total(least);
  }
}

// The unit by least squares on the codes of `block`; as it was where that has no answer.
Fp16 refitted_unit(const std::array<Parts, kQuarters>& x, const Block& block) {
  double aa = 0, ax = 0;  // x is about d * a
  for (std::size_t i = 0; i < kQuarters; ++i) {
    const Sums sums = code_sums(x[i], inverse_of(all(to_float(block.d)) * block.scales[i]));
    for (std::size_t l = 0; l < kLanes; ++l) {
      const auto s = static_cast<double>(block.scales[i][l]);
      aa += s * s * static_cast<double>(sums.qq[l]);
      ax += s * static_cast<double>(sums.qx[l]);
    }
  }
  return ax > 0 && ax / aa <= 65504 ? from_float<Fp16>(static_cast<float>(ax / aa)) : block.d;
}

Block choose_block(const float* values) {
  std::array<Parts, kQuarters> x;
  for (std::size_t part = 0; part < kParts; ++part) {
    for (std::size_t i = 0; i < kPart; ++i) {
      x[part / kLanes][i][part % kLanes] = values[part * kPart + i];
    }
  }
  Scales ideal;
  float largest = 0;
  for (std::size_t i = 0; i < kQuarters; ++i) {
    ideal[i] = best_scales(x[i]);
    for (std::size_t l = 0; l < kLanes; ++l) largest = std::max(largest, std::fabs(ideal[i][l]));
  }
  Block block;
  block.d = unit_of(largest, kMost);
  choose_scales(x, ideal, block);
  Block again = block;
  again.d = refitted_unit(x, block);
  choose_scales(x, ideal, again);
  return again.error < block.error ? again : block;
}

// Low nibbles of each half of 128, then their high pairs: decode_blocks.h.
void pack(const std::array<unsigned, kSuperblock>& codes, std::uint8_t* out) {
  for (std::size_t half = 0; half < 2; ++half) {
    const unsigned* of = codes.data() + half * 128;
    for (std::size_t i = 0; i < 64; ++i) {
      out[half * 64 + i] = static_cast<std::uint8_t>((of[i] & 15) | (of[i + 64] & 15) << 4);
    }
    for (std::size_t i = 0; i < 32; ++i) {
      unsigned pairs = 0;
      for (std::size_t quarter = 0; quarter < 4; ++quarter) {
        pairs |= (of[quarter * 32 + i] >> 4) << (2 * quarter);
      }
      out[128 + half * 32 + i] = static_cast<std::uint8_t>(pairs);
    }
  }
}

}  // namespace

void encode_q6_k(const float* values, std::size_t blocks, std::uint8_t* out) {
  for (; blocks > 0; --blocks, values += kSuperblock, out += 210) {
    const Block block = choose_block(values);
    std::array<unsigned, kSuperblock> codes;
    for (std::size_t part = 0; part < kParts; ++part) {
      const float whole = block.scales[part / kLanes][part % kLanes];
      const float inverse = inverse_of(to_float(block.d) * whole);
      for (std::size_t i = part * kPart; i < (part + 1) * kPart; ++i) {
        codes[i] = static_cast<unsigned>(nearest_code(values[i] * inverse, kLow, kHigh) - kLow);
      }
      out[192 + part] = static_cast<std::uint8_t>(static_cast<int>(whole));
    }
    pack(codes, out);
    std::memcpy(out + 208, &block.d, 2);
  }
}

}  // namespace monograph::gguf
