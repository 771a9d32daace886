// int4 for the kernels that decode in registers: units of a row whose groups are whole units, each
// with a scale and a zero point. Other weights of the format go by rows.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "monograph/formats/int4.h"

namespace monograph {

struct Int4Units {
  static constexpr Format kFormat = Int4::kFormat;
  static constexpr BlockShape kShape = BlockShape::kGroup;
  static constexpr std::size_t kBlock = 0, kPerByte = 2;
  static constexpr Nibbles kNibbles = Nibbles::kLowFirst;
  static constexpr std::size_t kUnit = 128;  // the usual group
};

struct ScaleAndZero {
  float scale;
  int zero;
};

// Scales of groups [first, first + count), as group_scale() gives them.
template <class Order, class S>
[[gnu::always_inline]] inline void scales_of_type(const std::uint8_t* scales, std::size_t count,
                                                  float* out) {
  using L = typename Order::L;
  const S* in = reinterpret_cast<const S*>(scales);
  std::size_t i = 0;
  for (; i + L::kLanes <= count; i += L::kLanes)
    L::store(out + i, Order::one_nan(L::load_as(in + i)));
  for (; i < count; ++i) {
    S scale;
    std::memcpy(&scale, in + i, sizeof scale);
    const float s = to_float(scale);
    out[i] = s != s ? std::bit_cast<float>(0x7fc00000u) : s;
  }
}
template <class Order>
[[gnu::always_inline]] inline void group_scales(const ScalesView& scales, std::size_t first,
                                                std::size_t count, float* out) {
  if (scales.one) {
    const float one = group_scale(scales, 0);
    for (std::size_t i = 0; i < count; ++i) out[i] = one;
    return;
  }
  const std::uint8_t* in = scales.blocks + first * size_bytes(scales.kind);
  if (scales.kind == ScaleKind::kBf16)
    scales_of_type<Order, Bf16>(in, count, out);
  else if (scales.kind == ScaleKind::kFp16)
    scales_of_type<Order, Fp16>(in, count, out);
  else
    scales_of_type<Order, float>(in, count, out);
}

[[gnu::always_inline]] inline void group_prefetch(const PackedView& weight, std::size_t row,
                                                  std::size_t col) {
  const int shift = std::countr_zero(weight.block);
  if (weight.block >> shift != 1 || weight.scales.one) return;
  const std::size_t element = (row + weight.origin_row()) * weight.cols + col;
  __builtin_prefetch(weight.scales.blocks + (element >> shift) * size_bytes(weight.scales.kind));
}

// Of `units` units from (row, col) on, where one begins, and as many of the rows that follow,
// `stride` apart. Groups are counted: a division for each would take as long as its elements.
template <class Order>
[[gnu::noinline]] void group_units(const PackedView& weight, std::size_t row, std::size_t rows,
                                   std::size_t col, std::size_t units, ScaleAndZero* out,
                                   std::size_t stride) {
  constexpr std::size_t kTogether = 32;  // groups
  const int shift = std::countr_zero(weight.block);
  const bool power = weight.block >> shift == 1;
  const std::size_t groups = power ? weight.cols >> shift : weight.cols / weight.block;
  const std::size_t begin = power ? col >> shift : col / weight.block;
  const std::size_t whole = weight.block / Int4Units::kUnit;
  const std::size_t behind = (col - begin * weight.block) / Int4Units::kUnit;
  row += weight.origin_row();
  for (const std::size_t end = row + rows; row < end; ++row, out += stride) {
    // Int4::zero_of(): a word has eight rows.
    const std::uint8_t* zeros = weight.scales.zeros;
    if (zeros != nullptr) zeros += row / 8 * groups * 4 + row % 8 / 2;
    const unsigned zero_shift = row % 2 * 4;
    const auto zero_of = [&](std::size_t group) __attribute__((always_inline)) {
      return zeros == nullptr ? Int4::kMiddle : zeros[4 * group] >> zero_shift & 15;
    };
    float scales[kTogether];
    std::size_t group = begin, left = units, same = whole - behind;
    ScaleAndZero* to = out;
    while (left != 0) {
      // Units that remain have at most as many groups.
      const std::size_t some = groups - group < left ? groups - group : left;
      const std::size_t count = some < kTogether ? some : kTogether;
      group_scales<Order>(weight.scales, row * groups + group, count, scales);
      if (whole == 1) {
        if (zeros == nullptr)
          for (std::size_t i = 0; i < count; ++i) to[i] = {scales[i], Int4::kMiddle};
        else
          for (std::size_t i = 0; i < count; ++i) to[i] = {scales[i], zero_of(group + i)};
        to += count;
        left -= count;
        group += count;
        continue;
      }
      for (std::size_t i = 0; i < count && left != 0; ++i, ++group, same = whole) {
        const ScaleAndZero numbers = {scales[i], zero_of(group)};
        if (same > left) same = left;
        left -= same;
        for (; same != 0; --same) *to++ = numbers;
      }
    }
  }
}

}  // namespace monograph
