// Weights in the formats with groups of a row, packed from codes, zero points and scales, and their
// elements computed the slow and obvious way. For tests; shares no arithmetic with the kernels.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "monograph/formats/bind.h"
#include "monograph/formats/tests/reference_weight.h"

namespace monograph {

enum class GroupScales { kEach, kOne };

struct GroupWeight {
  const FormatInfo* info = nullptr;
  std::size_t rows = 0, cols = 0, block = 0;
  std::vector<unsigned> codes;        // [rows, cols], as stored
  std::vector<unsigned> zeros;        // [rows, groups], as stored; empty if symmetric
  std::vector<std::uint32_t> scales;  // [rows, groups] or one, as bits of their type
  std::vector<std::uint8_t> value_bytes, scale_bytes, zero_bytes;
  std::vector<float> elements;  // before the rounding to the output type
  PackedView view;

  GroupWeight() = default;
  GroupWeight(const GroupWeight&) = delete;
  GroupWeight(GroupWeight&&) = default;

  std::size_t groups() const { return cols / block; }
  bool is_float() const { return info->zero_points == ZeroPoints::kNone; }
  bool is_signed() const { return info->zero_points == ZeroPoints::kBytes; }

  double scale(std::size_t row, std::size_t group) const {
    const std::uint32_t bits = scales[scales.size() == 1 ? 0 : row * groups() + group];
    if (info->kinds[0] == ScaleKind::kFp32) return std::bit_cast<float>(bits);
    if (info->kinds[0] == ScaleKind::kBf16) return std::bit_cast<float>(bits << 16);
    const int exponent = static_cast<int>(bits >> 10 & 31),
              fraction = static_cast<int>(bits & 1023);
    double magnitude =
        exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    if (exponent == 31) magnitude = fraction != 0 ? NAN : INFINITY;
    return (bits & 0x8000) != 0 ? -magnitude : magnitude;
  }

  double value(std::size_t row, std::size_t col) const {
    const unsigned code = codes[row * cols + col];
    if (is_float()) return e4m3_reference(code);
    const auto number = [&](unsigned stored) {
      return is_signed() && stored > 127 ? static_cast<double>(stored) - 256 : double(stored);
    };
    const double middle = is_signed() ? 0 : info->bits == 4 ? 8 : 128;
    const std::size_t group = row * groups() + col / block;
    return number(code) - (zeros.empty() ? middle : number(zeros[group]));
  }

  static void put(std::vector<std::uint8_t>& bytes, std::size_t bit, unsigned field) {
    bytes[bit / 8] = static_cast<std::uint8_t>(bytes[bit / 8] | field << bit % 8);
  }

  // From codes, zeros and scales: the bytes, the elements and the view.
  void pack() {
    const auto bits = static_cast<std::size_t>(info->bits);
    const std::size_t word = info->zero_points == ZeroPoints::kPacked ? 32 : 8;
    const std::size_t row_bits = (cols * bits + word - 1) / word * word;
    value_bytes.assign(rows * row_bits / 8, 0);
    for (std::size_t r = 0; r < rows; ++r)
      for (std::size_t c = 0; c < cols; ++c)
        put(value_bytes, r * row_bits + c * bits, codes[r * cols + c]);
    scale_bytes.clear();
    for (const std::uint32_t s : scales)
      for (std::size_t i = 0; i < size_bytes(info->kinds[0]); ++i)
        scale_bytes.push_back(static_cast<std::uint8_t>(s >> 8 * i));
    zero_bytes.clear();
    if (!zeros.empty() && is_signed())
      for (const unsigned z : zeros) zero_bytes.push_back(static_cast<std::uint8_t>(z));
    if (!zeros.empty() && !is_signed()) {
      const std::size_t per_word = 32 / bits;
      zero_bytes.assign((rows + per_word - 1) / per_word * groups() * 4, 0);
      for (std::size_t r = 0; r < rows; ++r)
        for (std::size_t g = 0; g < groups(); ++g)
          put(zero_bytes, (r / per_word * groups() + g) * 32 + r % per_word * bits,
              zeros[r * groups() + g]);
    }
    elements.resize(rows * cols);
    // Nine times 24 bits of mantissa: exact in double.
    for (std::size_t i = 0; i < rows * cols; ++i)
      elements[i] =
          static_cast<float>(value(i / cols, i % cols) * scale(i / cols, i % cols / block));
    bind();
  }

  void bind() {
    std::vector<ByteSpan> parts = {{scale_bytes.data(), scale_bytes.size()}};
    if (!zeros.empty()) parts.push_back({zero_bytes.data(), zero_bytes.size()});
    const std::size_t shape[] = {rows, cols};
    view = bind_packed(*info, block, shape, {value_bytes.data(), value_bytes.size()}, parts);
  }

  std::string name() const {
    return std::string(info->name) + (zeros.empty() ? " sym " : " asym ") + std::to_string(rows) +
           "x" + std::to_string(cols) + " in " + std::to_string(block) +
           (scales.size() == 1 ? ", one scale" : "");
  }
};

// The bits of a number of a kind of scale, toward zero.
inline std::uint32_t scale_bits(ScaleKind kind, float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (kind == ScaleKind::kFp32) return bits;
  if (kind == ScaleKind::kBf16) return bits >> 16;
  int exponent;
  const double fraction = std::frexp(static_cast<double>(x), &exponent);  // 0.5 ... 1, x > 2^-14
  return static_cast<std::uint32_t>(exponent + 14) << 10 |
         (static_cast<std::uint32_t>(fraction * 2048) & 1023);
}

// Elements of about 0.1; no NaN.
inline GroupWeight random_groups(const FormatInfo& info, std::size_t rows, std::size_t cols,
                                 std::size_t block, bool symmetric, unsigned seed,
                                 GroupScales how = GroupScales::kEach) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(0.0005f, 0.01f);
  GroupWeight w;
  w.info = &info;
  w.rows = rows;
  w.cols = cols;
  w.block = block;
  const auto code = [&] { return static_cast<unsigned>(random()) & (info.bits == 4 ? 15u : 255u); };
  for (std::size_t i = 0; i < rows * cols; ++i) {
    w.codes.push_back(code());
    if (w.is_float() && (w.codes.back() & 0x7f) == 0x7f) w.codes.back() = 0x3c;
  }
  const std::size_t count = how == GroupScales::kOne ? 1 : rows * w.groups();
  for (std::size_t i = 0; i < count; ++i)
    w.scales.push_back(scale_bits(info.kinds[0], uniform(random)));
  for (std::size_t i = 0; i < rows * w.groups() && !symmetric; ++i) w.zeros.push_back(code());
  w.pack();
  return w;
}

struct GroupCase {
  const FormatInfo* info;
  bool symmetric;
};
inline std::vector<GroupCase> group_cases() {
  std::vector<GroupCase> found;
  for (const FormatInfo& info : formats()) {
    if (info.shape != BlockShape::kGroup) continue;
    found.push_back({&info, true});
    if (info.zero_points != ZeroPoints::kNone) found.push_back({&info, false});
  }
  return found;
}

}  // namespace monograph
