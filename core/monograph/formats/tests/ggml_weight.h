// Weights in ggml's blocks: random bytes, and their elements read bit by bit, in double. For tests;
// shares no arithmetic with the kernels.
#pragma once

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "monograph/formats/bind.h"

namespace monograph {

inline double fp16_reference(const std::uint8_t* p) {
  const int exponent = p[1] >> 2 & 31, fraction = (p[1] & 3) << 8 | p[0];
  double x = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  if (exponent == 31) x = fraction != 0 ? NAN : INFINITY;
  return (p[1] & 0x80) != 0 ? -x : x;
}

inline int bits_at(const std::uint8_t* p, std::size_t first, int count) {
  int field = 0;
  for (int i = 0; i < count; ++i) {
    const std::size_t bit = first + static_cast<std::size_t>(i);
    field |= (p[bit / 8] >> bit % 8 & 1) << i;
  }
  return field;
}

// Element i of a block: (scale, code, minimum), from ggml-quants.c's structs.
inline double ggml_reference(std::string_view type, const std::uint8_t* b, std::size_t i) {
  constexpr double kTable[] = {-127, -104, -83, -65, -49, -35, -22, -10,
                               1,    13,   25,  38,  53,  69,  89,  113};
  const auto fp16 = [&](std::size_t at) { return fp16_reference(b + at); };
  const auto at8 = [](int byte) { return byte > 127 ? byte - 256 : byte; };
  const auto nibble = [&](std::size_t at) { return bits_at(b + at, i % 16 * 8 + i / 16 * 4, 4); };
  if (type == "q8_0") return fp16(0) * at8(b[2 + i]);
  if (type == "q4_0") return fp16(0) * (nibble(2) - 8);
  if (type == "iq4_nl") return fp16(0) * kTable[nibble(2)];
  if (type == "ggml_mxfp4") {
    constexpr double kE2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6};
    return std::ldexp(kE2m1[nibble(1)], b[0] - 127);
  }
  if (type == "q4_1") return fp16(0) * nibble(4) + fp16(2);
  if (type == "q5_0") return fp16(0) * (nibble(6) + 16 * bits_at(b + 2, i, 1) - 16);
  if (type == "q5_1") return fp16(0) * (nibble(8) + 16 * bits_at(b + 4, i, 1)) + fp16(2);
  const std::size_t part = i / 32, place = i % 32;
  if (type == "q6_k") {
    const int low = bits_at(b + i / 128 * 64 + i % 64, i % 128 / 64 * 4, 4);
    const int high = bits_at(b + 128 + i / 128 * 32 + place, i % 128 / 32 * 2, 2);
    return fp16(208) * at8(b[192 + i / 16]) * (low + 16 * high - 32);
  }
  if (type == "iq4_xs") {
    const int six = bits_at(b + 4, part * 4, 4) + 16 * bits_at(b + 2, part * 2, 2);
    return fp16(0) * (six - 32) *
           kTable[bits_at(b + 8 + part * 16, i % 16 * 8 + place / 16 * 4, 4)];
  }
  const bool five = type == "q5_k";
  int scale = bits_at(b + 4 + part, 0, 6), minimum = bits_at(b + 8 + part, 0, 6);
  if (part >= 4) {
    scale = bits_at(b + 8 + part, 0, 4) + 16 * bits_at(b + part, 6, 2);
    minimum = bits_at(b + 8 + part, 4, 4) + 16 * bits_at(b + 4 + part, 6, 2);
  }
  int code = bits_at(b + (five ? 48 : 16) + i / 64 * 32 + place, part % 2 * 4, 4);
  if (five) code += 16 * bits_at(b + 16 + place, part, 1);
  return fp16(0) * scale * code - fp16(2) * minimum;
}

struct GgmlWeight {
  const FormatInfo* info = nullptr;
  std::size_t rows = 0, cols = 0;
  std::vector<std::uint8_t> bytes;
  std::vector<std::int32_t> map;  // empty where rows are stored in order
  std::vector<float> elements;    // before the rounding to the output type
  PackedView view;

  GgmlWeight() = default;
  GgmlWeight(const GgmlWeight&) = delete;
  GgmlWeight(GgmlWeight&&) = default;

  void bind() {
    const std::size_t row_bytes = cols / info->largest_block * info->block_bytes;
    elements.resize(rows * cols);
    for (std::size_t i = 0; i < rows * cols; ++i) {
      const std::size_t row = map.empty() ? i / cols : static_cast<std::size_t>(map[i / cols]);
      const std::size_t block = i % cols / info->largest_block;
      elements[i] = static_cast<float>(
          ggml_reference(info->name, bytes.data() + row * row_bytes + block * info->block_bytes,
                         i % cols % info->largest_block));
    }
    const std::size_t shape[] = {rows, cols};
    std::vector<ByteSpan> scales;
    if (!map.empty())
      scales.push_back({reinterpret_cast<const std::uint8_t*>(map.data()), 4 * map.size()});
    view = bind_packed(*info, info->largest_block, shape, {bytes.data(), bytes.size()}, scales);
  }
};

// Where the fp16 numbers of a block lie; -1 for none. Of ggml_mxfp4 the scale is one byte.
struct Fp16Places {
  int scale, minimum;
};
inline Fp16Places fp16_places(std::string_view type) {
  if (type == "q6_k") return {208, -1};
  const bool two = type == "q4_1" || type == "q5_1" || type == "q4_k" || type == "q5_k";
  return {0, two ? 2 : -1};
}

enum class GgmlScales { kAny, kSmall };

// Random bytes; kSmall: elements of about 0.1, no NaN.
inline GgmlWeight random_ggml(const FormatInfo& info, std::size_t rows, std::size_t cols,
                              unsigned seed, GgmlScales how = GgmlScales::kSmall) {
  std::mt19937 random(seed);
  GgmlWeight w;
  w.info = &info;
  w.rows = rows;
  w.cols = cols;
  w.bytes.resize(rows * cols / info.largest_block * info.block_bytes);
  for (std::uint8_t& byte : w.bytes) byte = static_cast<std::uint8_t>(random());
  const auto [scale, minimum] = fp16_places(info.name);
  const bool parts = info.largest_block == 256;
  for (std::size_t b = 0; how == GgmlScales::kSmall && b < w.bytes.size(); b += info.block_bytes) {
    if (info.format == Format::kGgmlMxfp4) {
      w.bytes[b] = static_cast<std::uint8_t>(121 + random() % 4);
      continue;
    }
    // 2^-7 for one level of scales, 2^-12 for two, any sign and fraction.
    for (const int at : {scale, minimum})
      if (at >= 0)
        w.bytes[b + static_cast<std::size_t>(at) + 1] =
            static_cast<std::uint8_t>((random() & 0x83u) | (parts ? 3u : 8u) << 2);
  }
  w.bind();
  return w;
}

inline std::vector<const FormatInfo*> ggml_formats() {
  std::vector<const FormatInfo*> found;
  for (const FormatInfo& info : formats())
    if (info.shape == BlockShape::kInterleaved) found.push_back(&info);
  return found;
}

}  // namespace monograph
