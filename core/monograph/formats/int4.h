// int4 affine: compressed-tensors' pack-quantized with four bits (W4A16), and what GPTQ, AWQ and
// AutoRound become in its row layout.
//   values  codes 0 ... 15, two a byte, the even element in the low nibble; each row is padded to
//           whole words of 32 bits: K = 500 takes 252 bytes
//   scales  [rows, groups] of the type that the format's number says
//   zeros   none: 8 for all (symmetric); or packed along the rows, [ceil(rows / 8), groups] words
//   of
//           32 bits, row 8 i + j in bits 4 j ... 4 j + 3
//   decode: (code - zero) * scale, the product rounded to fp32, then to the output type.
#pragma once

#include "monograph/base/nibbles.h"
#include "monograph/formats/row_groups.h"

namespace monograph {

struct Int4 {
  static constexpr Format kFormat = Format::kInt4Bf16;
  static constexpr BlockShape kShape = BlockShape::kGroup;
  static constexpr int kMiddle = 8;
  static constexpr float kLowest = -8, kHighest = 7;
  // kDifferences[15 - zero + code] is code - zero.
  static constexpr float kDifferences[31] = {-15, -14, -13, -12, -11, -10, -9, -8, -7, -6, -5,
                                             -4,  -3,  -2,  -1,  0,   1,   2,  3,  4,  5,  6,
                                             7,   8,   9,   10,  11,  12,  13, 14, 15};

  [[gnu::always_inline]] static std::uint8_t code_of(float number) {
    return static_cast<std::uint8_t>(nearest_integer(number) + kMiddle);
  }

  [[gnu::always_inline]] static int zero_of(const PackedView& weight, std::size_t row,
                                            std::size_t group) {
    if (weight.scales.zeros == nullptr) return kMiddle;
    const std::uint8_t byte = packed_zero_byte(weight, row, group, 8);
    return row % 2 == 0 ? byte & 15 : byte >> 4;
  }

  template <class T>
  [[gnu::always_inline]] static T decode_one(const std::uint8_t* values, std::size_t col,
                                             float scale, int zero) {
    const int code = col % 2 == 0 ? values[col / 2] & 15 : values[col / 2] >> 4;
    return from_float<T>(static_cast<float>(code - zero) * scale);
  }

  template <class V, class T>
  [[gnu::always_inline]] static void decode_group(const std::uint8_t* values, std::size_t col,
                                                  std::size_t count, float scale, int zero,
                                                  T* out) {
    constexpr std::size_t lanes = V::template kLanes<T>;
    const std::size_t stop = col + count;
    if (col % 2 != 0 && col < stop) *out++ = decode_one<T>(values, col++, scale, zero);
    if (col + lanes <= stop) {
      const auto& differences = *reinterpret_cast<const float(*)[16]>(kDifferences + 15 - zero);
      const auto table = V::template scaled_table<T>(differences, scale);
      for (; col + lanes <= stop; col += lanes, out += lanes)
        V::template store<T>(out,
                             V::template lookup<T, Nibbles::kLowFirst>(table, values + col / 2));
    }
    for (; col < stop; ++col) *out++ = decode_one<T>(values, col, scale, zero);
  }
};

}  // namespace monograph
