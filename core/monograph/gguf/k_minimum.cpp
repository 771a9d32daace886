// Q4_K and Q5_K: eight parts of 32 elements with a scale and a minimum of six bits each.
//
// A part first: for several steps the codes of the steps, then scale and minimum by least squares
// on these codes, the best of all. Then the two fp16 units, the six bits of each part as the best
// of the nine nearest pairs, and the units again by least squares on the codes, which are kept if
// they are better. Errors are squared and not weighted: what a layer's output sees of inputs that
// are alike.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "monograph/gguf/blocks.h"
#include "monograph/gguf/k_groups.h"

namespace monograph::gguf {
namespace {

constexpr std::size_t kParts = 8, kPart = kSuperblock / kParts;
constexpr float kSix = 63;
// Steps that are tried: (codes - 1 + kFirst + i * kBetween) to the range of the part.
constexpr int kSteps = 13;
constexpr float kFirst = -0.9f, kBetween = 0.15f;

// x is about scale * code - minimum; neither is negative.
struct Line {
  float scale = 0, minimum = 0;
};

struct PartSums {
  float x = 0, xx = 0, low = 0, high = 0;  // low <= 0
};

PartSums sums_of(const float* x) {
  Lanes sum{}, square{}, low{}, high = load(x);
  for (std::size_t i = 0; i < kPart; i += kLanes) {
    const Lanes value = load(x + i);
    sum += value;
    square += value * value;
    low = smaller(value, low);
    high = larger(value, high);
  }
  return {total(sum), total(square), std::min({low[0], low[1], low[2], low[3]}),
          std::max({high[0], high[1], high[2], high[3]})};
}

struct CodeSums {
  float q = 0, qq = 0, qx = 0;
};

// Sums over the codes round((x + offset) * inverse).
CodeSums code_sums(const float* x, float offset, float inverse, float most) {
  Lanes q{}, qq{}, qx{};
  for (std::size_t i = 0; i < kPart; i += kLanes) {
    const Lanes value = load(x + i);
    const Lanes code = nearest_code((value + all(offset)) * all(inverse), all(0), all(most));
    q += code;
    qq += code * code;
    qx += code * value;
  }
  return {total(q), total(qq), total(qx)};
}

// The best line for these codes, and what its squared error lacks of the sum of squares of x.
float fit(const CodeSums& codes, const PartSums& part, Line& line) {
  constexpr auto kCount = static_cast<float>(kPart);
  const float determinant = kCount * codes.qq - codes.q * codes.q;
  if (determinant > 0) {
    const float scale = (kCount * codes.qx - codes.q * part.x) / determinant;
    const float base = (codes.qq * part.x - codes.q * codes.qx) / determinant;
    if (scale > 0 && base <= 0) {
      line = {scale, -base};
      return scale * codes.qx + base * part.x;
    }
  }
  line = {codes.qq > 0 ? std::max(codes.qx / codes.qq, 0.0f) : 0, 0};
  return line.scale * codes.qx;
}

Line best_line(const float* x, float most) {
  const PartSums part = sums_of(x);
  const float range = part.high - part.low;
  Line best;
  if (!(range > 0)) return {0, -part.low};  // every element is the same, and not above 0
  float gained = -std::numeric_limits<float>::infinity();
  const auto attempt = [&](float offset, float inverse) {
    Line line;
    const float gain = fit(code_sums(x, offset, inverse, most), part, line);
    if (gain > gained) {
      gained = gain;
      best = line;
    }
  };
  for (int i = 0; i < kSteps; ++i) {
    const float steps = most + kFirst + static_cast<float>(i) * kBetween;
    attempt(-part.low, steps * inverse_of(range));
  }
  // Codes of the best line may be others than those that it was made of.
  for (int again = 0; again < 2; ++again) attempt(best.minimum, inverse_of(best.scale));
  return best;
}

// The squared error of the part with this line, by whose codes.
float error_of(const float* x, Line line, float most) {
  const float inverse = inverse_of(line.scale);
  Lanes error{};
  for (std::size_t i = 0; i < kPart; i += kLanes) {
    const Lanes value = load(x + i), minimum = all(line.minimum);
    const Lanes code = nearest_code((value + minimum) * all(inverse), all(0), all(most));
    const Lanes off = (all(line.scale) * code - minimum) - value;
    error += off * off;
  }
  return total(error);
}

// Units, and their whole numbers for each part.
struct Block {
  Fp16 d{}, dmin{};
  std::array<float, kParts> scales{}, minima{};
  float error = 0;

  Line line(std::size_t part) const {
    return {to_float(d) * scales[part], to_float(dmin) * minima[part]};
  }
};

float whole_of(float x, float unit) { return unit > 0 ? nearest_code(x / unit, 0, kSix) : 0; }

// The six bits of every part under the units of `block`, around the ideal lines.
void choose_six_bits(const float* x, const std::array<Line, kParts>& lines, float most,
                     Block& block) {
  const float d = to_float(block.d), dmin = to_float(block.dmin);
  block.error = 0;
  for (std::size_t part = 0; part < kParts; ++part) {
    const float scale = whole_of(lines[part].scale, d),
                minimum = whole_of(lines[part].minimum, dmin);
    float least = std::numeric_limits<float>::infinity();
    for (const float ds : {0.0f, -1.0f, 1.0f}) {
      for (const float dm : {0.0f, -1.0f, 1.0f}) {
        const float s = scale + ds, m = minimum + dm;
        if (s < 0 || s > kSix || m < 0 || m > kSix) continue;
        const float error = error_of(x + part * kPart, {d * s, dmin * m}, most);
        if (!(error < least)) continue;
        least = error;
        block.scales[part] = s;
        block.minima[part] = m;
      }
    }
    block.error += least;
  }
}

// The units by least squares on the codes of `block`; as they were where that has no answer.
void refit_units(const float* x, float most, Block& block) {
  double aa = 0, ab = 0, bb = 0, ax = 0, bx = 0;  // x is about d * a - dmin * b
  for (std::size_t part = 0; part < kParts; ++part) {
    const Line line = block.line(part);
    const CodeSums codes = code_sums(x + part * kPart, line.minimum, inverse_of(line.scale), most);
    const double s = static_cast<double>(block.scales[part]),
                 m = static_cast<double>(block.minima[part]);
    const double sum = static_cast<double>(sums_of(x + part * kPart).x);
    aa += s * s * static_cast<double>(codes.qq);
    ab += s * m * static_cast<double>(codes.q);
    bb += m * m * static_cast<double>(kPart);
    ax += s * static_cast<double>(codes.qx);
    bx += m * sum;
  }
  const double determinant = aa * bb - ab * ab;
  double d = aa > 0 ? ax / aa : 0, dmin = static_cast<double>(to_float(block.dmin));
  if (determinant > 1e-9 * aa * bb) {
    d = (ax * bb - ab * bx) / determinant;
    dmin = (ab * ax - aa * bx) / determinant;
  }
  if (!(d > 0) || !(dmin >= 0) || d > 65504 || dmin > 65504) return;
  block.d = from_float<Fp16>(static_cast<float>(d));
  block.dmin = from_float<Fp16>(static_cast<float>(dmin));
}

Block choose_block(const float* x, float most) {
  std::array<Line, kParts> lines;
  float scale = 0, minimum = 0;
  for (std::size_t part = 0; part < kParts; ++part) {
    lines[part] = best_line(x + part * kPart, most);
    scale = std::max(scale, lines[part].scale);
    minimum = std::max(minimum, lines[part].minimum);
  }
  Block block;
  block.d = unit_of(scale, kSix);
  block.dmin = unit_of(minimum, kSix);
  choose_six_bits(x, lines, most, block);
  Block again = block;
  refit_units(x, most, again);
  choose_six_bits(x, lines, most, again);
  return again.error < block.error ? again : block;
}

// Six bits of each part in twelve bytes, as decode_superblocks.cpp reads them.
void pack_six_bits(const Block& block, std::uint8_t* out) {
  const auto bits = [](float whole) { return static_cast<unsigned>(whole); };
  for (std::size_t i = 0; i < 4; ++i) {
    const unsigned scale = bits(block.scales[i + 4]), minimum = bits(block.minima[i + 4]);
    out[i] = static_cast<std::uint8_t>(bits(block.scales[i]) | (scale >> 4) << 6);
    out[i + 4] = static_cast<std::uint8_t>(bits(block.minima[i]) | (minimum >> 4) << 6);
    out[i + 8] = static_cast<std::uint8_t>((scale & 15) | (minimum & 15) << 4);
  }
}

void encode(const float* x, float most, std::uint8_t* out, std::uint8_t* fifth,
            std::uint8_t* nibbles) {
  const Block block = choose_block(x, most);
  std::memcpy(out, &block.d, 2);
  std::memcpy(out + 2, &block.dmin, 2);
  pack_six_bits(block, out + 4);
  std::array<unsigned, kSuperblock> codes;
  for (std::size_t part = 0; part < kParts; ++part) {
    const Line line = block.line(part);
    const float inverse = inverse_of(line.scale);
    for (std::size_t i = part * kPart; i < (part + 1) * kPart; ++i) {
      codes[i] = static_cast<unsigned>(nearest_code((x[i] + line.minimum) * inverse, 0, most));
    }
  }
  for (std::size_t pair = 0; pair < kParts; pair += 2) {
    for (std::size_t i = 0; i < kPart; ++i) {
      const unsigned low = codes[pair * kPart + i], high = codes[(pair + 1) * kPart + i];
      nibbles[pair / 2 * kPart + i] = static_cast<std::uint8_t>((low & 15) | (high & 15) << 4);
    }
  }
  for (std::size_t i = 0; fifth != nullptr && i < kPart; ++i) {
    unsigned bits = 0;
    for (std::size_t part = 0; part < kParts; ++part)
      bits |= (codes[part * kPart + i] >> 4) << part;
    fifth[i] = static_cast<std::uint8_t>(bits);
  }
}

}  // namespace

void encode_q4_k(const float* values, std::size_t blocks, std::uint8_t* out) {
  for (; blocks > 0; --blocks, values += kSuperblock, out += 144) {
    encode(values, 15, out, nullptr, out + 16);
  }
}

void encode_q5_k(const float* values, std::size_t blocks, std::uint8_t* out) {
  for (; blocks > 0; --blocks, values += kSuperblock, out += 176) {
    encode(values, 31, out, out + 16, out + 48);
  }
}

}  // namespace monograph::gguf
