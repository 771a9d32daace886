// Random weights in the formats with small floating-point elements, and their elements computed the
// slow and obvious way. For tests; shares no arithmetic with the kernels.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "monograph/formats/packed_view.h"

namespace monograph {

inline double e2m1_reference(unsigned code) {
  constexpr double kMagnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return (code & 8) != 0 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7];
}

inline double e4m3_reference(unsigned code) {
  const int exponent = static_cast<int>(code >> 3 & 15), mantissa = static_cast<int>(code & 7);
  if ((code & 0x7f) == 0x7f) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 7 - 3);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

inline double e8m0_reference(unsigned byte) {
  return byte == 255 ? std::numeric_limits<double>::quiet_NaN()
                     : std::ldexp(1.0, static_cast<int>(byte) - 127);
}

struct ReferenceWeight {
  std::vector<std::uint8_t> values, scales, tensor;
  std::vector<float> elements;  // dequantised, before the rounding to the output type
  PackedView view;

  ReferenceWeight() = default;
  ReferenceWeight(const ReferenceWeight&) = delete;
  ReferenceWeight(ReferenceWeight&&) = default;

  // The scale of the block that (row, col) lies in; each line rounds once.
  float scale_at(const FormatInfo& info, std::size_t row, std::size_t col) const {
    const std::size_t matrix_rows = view.matrix_rows == 0 ? view.rows : view.matrix_rows;
    const std::size_t matrix = row / matrix_rows;
    std::size_t block = (row * view.cols + col) / view.block;
    if (info.shape == BlockShape::kSquare)
      block = (matrix * ceil_div(matrix_rows, view.block) + row % matrix_rows / view.block) *
                  ceil_div(view.cols, view.block) +
              col / view.block;
    const std::uint8_t* at = scales.data() + block * size_bytes(view.scales.kind);
    float plain = 0.0f;
    std::uint32_t word = 0;
    switch (view.scales.kind) {
      case ScaleKind::kFp32:
        std::memcpy(&plain, at, 4);
        return plain;
      case ScaleKind::kBf16:
        std::memcpy(reinterpret_cast<std::uint8_t*>(&word) + 2, at, 2);
        return std::bit_cast<float>(word);
      case ScaleKind::kE8m0:
        return static_cast<float>(e8m0_reference(*at));
      case ScaleKind::kFp16:  // of no format here
      case ScaleKind::kE4m3:
        break;
    }
    const float stored = static_cast<float>(e4m3_reference(*at));
    if (tensor.empty()) return stored;
    std::memcpy(&plain, tensor.data() + (tensor.size() == 4 ? 0 : 4 * matrix), 4);
    return view.scales.tensor_divides ? stored / plain : stored * plain;
  }

  void compute_elements(const FormatInfo& info) {
    elements.clear();
    for (std::size_t row = 0; row < view.rows; ++row)
      for (std::size_t col = 0; col < view.cols; ++col) {
        const std::size_t i = row * view.cols + col;
        const unsigned code = info.bits == 8 ? values[i]
                              : i % 2 == 0   ? values[i / 2] & 15u
                                             : values[i / 2] >> 4;
        const double value = info.bits == 8 ? e4m3_reference(code) : e2m1_reference(code);
        // At most 4 times 24 bits of mantissa: exact in double.
        elements.push_back(static_cast<float>(value * scale_at(info, row, col)));
      }
  }
};

// Elements of about 0.1; no NaN, so that products of it can be compared.
inline ReferenceWeight random_reference(const FormatInfo& info, ScaleKind kind,
                                        std::size_t matrices, std::size_t rows, std::size_t cols,
                                        unsigned seed) {
  std::mt19937 random(seed);
  ReferenceWeight w;
  const std::size_t block = info.smallest_block;
  w.values.resize(packed_bytes(info, matrices * rows * cols));
  for (auto& v : w.values) {
    v = static_cast<std::uint8_t>(random());
    if (info.bits == 8 && (v & 0x7f) == 0x7f) v = 0x3c;
  }
  const std::size_t blocks = block_count(info.shape, block, matrices, rows, cols);
  std::uniform_real_distribution<float> uniform(0.0001f, 0.001f);
  for (std::size_t i = 0; i < blocks; ++i) {
    const float scale = uniform(random);
    std::uint8_t bytes[4];
    std::memcpy(bytes, &scale, 4);
    if (kind == ScaleKind::kFp32) w.scales.insert(w.scales.end(), bytes, bytes + 4);
    if (kind == ScaleKind::kBf16) w.scales.insert(w.scales.end(), bytes + 2, bytes + 4);
    const std::uint8_t exponent = static_cast<std::uint8_t>(info.bits == 8 ? 115 : 121);
    if (kind == ScaleKind::kE8m0)
      w.scales.push_back(static_cast<std::uint8_t>(exponent + random() % 4));
    if (kind == ScaleKind::kE4m3) w.scales.push_back(static_cast<std::uint8_t>(random() % 0x7f));
  }
  if (info.tensor_scale != TensorScale::kNone)
    for (std::size_t i = 0; i < matrices; ++i) {
      const float scale =
          info.tensor_scale == TensorScale::kDivides ? 1 / uniform(random) : uniform(random);
      const auto* bytes = reinterpret_cast<const std::uint8_t*>(&scale);
      w.tensor.insert(w.tensor.end(), bytes, bytes + 4);
    }
  w.view.format = info.kernels;
  w.view.rows = matrices * rows;
  w.view.cols = cols;
  w.view.block = block;
  w.view.matrix_rows = matrices > 1 ? rows : 0;
  w.view.values = w.values.data();
  w.view.scales.blocks = w.scales.data();
  w.view.scales.kind = kind;
  w.view.scales.tensor = w.tensor.empty() ? nullptr : w.tensor.data();
  w.view.scales.blocks_per_tensor = matrices > 1 ? blocks / matrices : 0;
  w.view.scales.tensor_divides = info.tensor_scale == TensorScale::kDivides;
  w.compute_elements(info);
  return w;
}

// Every format of this kind, with every kind of scale it has.
struct ElementFormat {
  FormatInfo info;
  ScaleKind kind;
};
inline std::vector<ElementFormat> element_formats() {
  std::vector<ElementFormat> found;
  for (const FormatInfo& info : formats())
    if (info.shape == BlockShape::kRow || info.shape == BlockShape::kSquare)
      for (const ScaleKind kind : info.kinds) found.push_back({info, kind});
  return found;
}

}  // namespace monograph
