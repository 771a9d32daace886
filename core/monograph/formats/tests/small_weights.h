// Small random weights of every format and kind of scale, for tests that cut them at every row.
#pragma once

#include <array>
#include <bit>
#include <random>
#include <string>
#include <vector>

#include "monograph/formats/bind.h"

namespace monograph {

using Bytes = std::vector<std::uint8_t>;

struct SmallWeight {
  std::string name;
  const FormatInfo* info;
  std::size_t block;
  std::vector<std::size_t> shape;
  Bytes values;
  std::vector<Bytes> scales;
  PackedView view;  // of the bytes above, which a move leaves where they are

  SmallWeight() = default;
  SmallWeight(const SmallWeight&) = delete;
  SmallWeight(SmallWeight&&) = default;
};

inline void append_float(Bytes& to, float x) {
  const auto bytes = std::bit_cast<std::array<std::uint8_t, 4>>(x);
  to.insert(to.end(), bytes.begin(), bytes.end());
}

inline PackedView bound(const SmallWeight& w) {
  std::vector<ByteSpan> scales;
  for (const Bytes& bytes : w.scales) scales.push_back({bytes.data(), bytes.size()});
  return bind_packed(*w.info, w.block, w.shape, {w.values.data(), w.values.size()}, scales);
}

// Finite elements of about 0.1. `nested`: double-quantised, in groups of 256 scales.
inline SmallWeight small_weight(const char* format, ScaleKind kind, std::size_t block, bool nested,
                                std::vector<std::size_t> shape, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(0.001f, 0.01f);
  SmallWeight w;
  w.info = find_format(format);
  w.block = block;
  w.shape = shape;
  w.name.append(format).append(" ").append(name_of(kind)).append(nested ? " nested" : "");
  for (const std::size_t size : shape) w.name.append(" ").append(std::to_string(size));
  const MatrixShape matrix = matrix_shape(*w.info, block, shape);
  w.values.resize(packed_bytes(*w.info, matrix.elements()));
  for (auto& v : w.values) {
    v = static_cast<std::uint8_t>(random());
    if (w.info->bits == 8 && (v & 0x7f) == 0x7f) v = 0x3c;  // no NaN
  }
  const std::size_t blocks =
      block_count(w.info->shape, block, matrix.matrices, matrix.rows, matrix.cols);
  Bytes stored, groups, map, offset, tensor;
  for (std::size_t i = 0; i < blocks; ++i) {
    const auto bytes = std::bit_cast<std::array<std::uint8_t, 4>>(uniform(random));
    if (nested)
      stored.push_back(static_cast<std::uint8_t>(random()));
    else if (kind == ScaleKind::kFp32)
      stored.insert(stored.end(), bytes.begin(), bytes.end());
    else if (kind == ScaleKind::kBf16)
      stored.insert(stored.end(), bytes.begin() + 2, bytes.end());
    else if (kind == ScaleKind::kE8m0)
      stored.push_back(static_cast<std::uint8_t>(115 + random() % 6));
    else
      stored.push_back(static_cast<std::uint8_t>(1 + random() % 0x7e));
  }
  w.scales.push_back(std::move(stored));
  if (nested) {
    for (std::size_t i = 0; i < ceil_div(blocks, kScaleGroup); ++i)
      append_float(groups, uniform(random));
    for (int i = 0; i < 256; ++i) append_float(map, static_cast<float>(i - 128) / 128);
    append_float(offset, 0.02f);
    w.scales.insert(w.scales.end(), {groups, map, offset});
  } else if (w.info->tensor_scale != TensorScale::kNone) {
    for (std::size_t i = 0; i < matrix.matrices; ++i)
      append_float(tensor, w.info->tensor_scale == TensorScale::kDivides ? 1 / uniform(random)
                                                                         : uniform(random));
    w.scales.push_back(std::move(tensor));
  }
  w.view = bound(w);
  return w;
}

// Rows that begin in the middle of bytes, blocks, groups of 256 blocks and square blocks; matrices
// that are no whole number of blocks; a tensor scale for each matrix.
inline std::vector<SmallWeight> small_weights() {
  using enum ScaleKind;
  std::vector<SmallWeight> all;
  unsigned seed = 0;
  const auto add = [&](const char* format, ScaleKind kind, std::size_t block, bool nested,
                       std::vector<std::size_t> shape) {
    all.push_back(small_weight(format, kind, block, nested, std::move(shape), ++seed));
  };
  for (const char* format : {"nf4", "fp4"}) {
    add(format, kFp32, 32, false, {7, 33});
    add(format, kFp32, 64, false, {9, 64});
    add(format, kFp32, 128, false, {9, 96});
    add(format, kFp32, 64, true, {3, 5, 21});
  }
  add("nf4", kFp32, 32, true, {60, 149});   // the group ends inside row 54
  add("nf4", kFp32, 64, true, {70, 256});   // and here with row 63
  add("fp4", kFp32, 64, true, {48, 352});   // inside row 46, at a multiple of 32
  add("fp4", kFp32, 4096, true, {50, 96});  // few blocks
  for (const char* format : {"mxfp4", "mxfp8"}) {
    add(format, kE8m0, 32, false, {9, 32});
    add(format, kE8m0, 32, false, {9, 192});
    add(format, kE8m0, 32, false, {3, 4, 96});
  }
  for (const char* format : {"nvfp4", "nvfp4-divide"}) {
    add(format, kE4m3, 16, false, {9, 48});
    add(format, kE4m3, 16, false, {9, 128});
    add(format, kE4m3, 16, false, {3, 5, 64});
    add(format, kE4m3, 16, false, {2, 3, 4, 32});
  }
  for (const ScaleKind kind : {kFp32, kBf16, kE8m0}) {
    add("fp8-block", kind, 128, false, {260, 64});
    add("fp8-block", kind, 128, false, {3, 70, 192});
  }
  add("fp8-block", kFp32, 128, false, {140, 133});
  return all;
}

}  // namespace monograph
