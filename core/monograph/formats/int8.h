// int8 affine, in compressed-tensors' two ways of storing it:
//   int8         int-quantized: int8 [rows, cols]; zeros int8 [rows, groups], or none: 0
//   int8-packed  pack-quantized with eight bits (W8A16): code + 128 a byte, each row padded to
//   whole
//                words of 32 bits; zeros packed along the rows, [ceil(rows / 4), groups] words, row
//                4 i + j in byte j; or none: 128
//   scales [rows, groups] of the type that the format's number says, or one for all.
//   decode: (code - zero) * scale, the product rounded to fp32, then to the output type.
// One kernel serves both: a packed code and its zero point are 128 more than the signed ones.
#pragma once

#include "monograph/formats/row_groups.h"

namespace monograph {

struct Int8 {
  static constexpr Format kFormat = Format::kInt8Bf16;
  static constexpr BlockShape kShape = BlockShape::kGroup;
  static constexpr float kLowest = -128, kHighest = 127;

  // Signed; what is stored with 128 added is this with the upper bit flipped.
  [[gnu::always_inline]] static std::uint8_t code_of(float number) {
    return static_cast<std::uint8_t>(nearest_integer(number));
  }

  // What a group's elements have in common. `flip` is 0x80 where codes are stored with 128 added:
  // it makes them signed.
  struct Zero {
    int value;
    std::uint8_t flip;
  };

  [[gnu::always_inline]] static int as_signed(std::uint8_t byte, std::uint8_t flip) {
    return static_cast<std::int8_t>(byte ^ flip);
  }

  [[gnu::always_inline]] static Zero zero_of(const PackedView& weight, std::size_t row,
                                             std::size_t group) {
    const bool packed = weight.scales.zero_points == ZeroPoints::kPacked;
    const std::uint8_t flip = packed ? 0x80 : 0;
    if (weight.scales.zeros == nullptr) return {0, flip};
    if (packed) return {as_signed(packed_zero_byte(weight, row, group, 4), flip), flip};
    const std::size_t groups = weight.cols / weight.block;
    return {as_signed(weight.scales.zeros[row * groups + group], flip), flip};
  }

  template <class V, class T>
  [[gnu::always_inline]] static void decode_group(const std::uint8_t* values, std::size_t col,
                                                  std::size_t count, float scale, Zero zero,
                                                  T* out) {
    constexpr std::size_t lanes = V::template kLanes<T>;
    const std::size_t stop = col + count;
    for (; col + lanes <= stop; col += lanes, out += lanes)
      V::template store<T>(out,
                           V::template scaled_int8<T>(values + col, zero.flip, zero.value, scale));
    for (; col < stop; ++col)
      *out++ =
          from_float<T>(static_cast<float>(as_signed(values[col], zero.flip) - zero.value) * scale);
  }
};

}  // namespace monograph
