// What formats with groups of a row share (BlockShape::kGroup): each group of `block` elements has
// a scale, and may have a zero point.
//   element = (code - zero) * scale, the difference exact, the product rounded to fp32, then to the
//   output type.
// The scale is fp32, fp16 or bf16 as the format's number says, [rows, groups], or one for all. A
// format F supplies zero_of(weight, row, group) and decode_group<V, T>(values, col, count, scale,
// zero, out): `count` elements of one group from column `col` of the row whose first byte is
// `values`. To quantise: the range kLowest ... kHighest of its codes as numbers, and
// code_of(number), a byte of its own.
//   encode, as compressed-tensors computes on a CPU: in the type T of the weight, every result
//   rounded to T; lo and hi are the group's smallest and largest element, and 0 between them
//     absmax  s = max(-lo, hi) / ((kHighest - kLowest) / 2), zero = 0
//     minmax  s = (hi - lo) / (kHighest - kLowest), zero = kLowest - lo / s, rounded to even and
//             clamped; where hi - lo overflows, both are divided first
//   s is rounded to the type of the scales; where that is 0 it becomes that type's epsilon, and
//   where lo / s is NaN zero is 0.
//   number = x / s + zero, clamped to kLowest ... kHighest; its code is the nearest, ties to even.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "monograph/base/float_types.h"
#include "monograph/formats/packed_view.h"

namespace monograph {

// Every NaN scale becomes the same NaN, as in fp8_block.h.
[[gnu::always_inline]] inline float group_scale(const ScalesView& scales, std::size_t group) {
  const std::size_t at = scales.one ? 0 : group;
  float s;
  if (scales.kind == ScaleKind::kFp32) {
    s = load_f32(scales.blocks + 4 * at);
  } else {
    std::uint16_t bits;
    std::memcpy(&bits, scales.blocks + 2 * at, sizeof bits);
    s = scales.kind == ScaleKind::kFp16 ? to_float(Fp16{bits}) : to_float(Bf16{bits});
  }
  return s != s ? std::bit_cast<float>(0x7fc00000u) : s;
}

// The byte that holds field `row` of a column of zero points packed along the rows, `per_word` of
// them in 32 bits, the first in the lowest bits.
[[gnu::always_inline]] inline std::uint8_t packed_zero_byte(const PackedView& weight,
                                                            std::size_t row, std::size_t group,
                                                            std::size_t per_word) {
  const std::size_t groups = weight.cols / weight.block;
  return weight.scales.zeros[(row / per_word * groups + group) * 4 + row % per_word * 4 / per_word];
}

// x rounded to an integer, ties to even; its magnitude is below 2^22.
[[gnu::always_inline]] inline int nearest_integer(float x) {
  return std::bit_cast<int>(x + 0x1.8p23f) - std::bit_cast<int>(0x1.8p23f);
}

template <class F, class V, class T>
[[gnu::always_inline]] inline void decode_groups(const PackedView& weight, std::size_t row,
                                                 std::size_t begin, std::size_t end, T* out) {
  row += weight.origin_row();
  const std::uint8_t* values = weight.values + row * weight.row_bytes;
  const std::size_t first = row * (weight.cols / weight.block);
  std::size_t group = begin / weight.block, stop = (group + 1) * weight.block;
  for (; begin < end; ++group, stop += weight.block) {
    const std::size_t last = stop < end ? stop : end;
    F::template decode_group<V, T>(values, begin, last - begin,
                                   group_scale(weight.scales, first + group),
                                   F::zero_of(weight, row, group), out);
    out += last - begin;
    begin = last;
  }
}

}  // namespace monograph
