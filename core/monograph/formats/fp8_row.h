// FP8 with a scale for each row, or one for the whole matrix: compressed-tensors' float-quantized
// with strategy channel or tensor, and ModelOpt's FP8. E4M3 elements [rows, cols], scales [rows,
// groups] of the type that the format's number says, or one for all; the group is mostly the row.
//   decode: value(code) * scale, the product rounded to fp32, then to the output type.
#pragma once

#include "monograph/formats/e4m3_bytes.h"
#include "monograph/formats/row_groups.h"

namespace monograph {

struct Fp8Row : E4m3Format<Fp8Row> {
  static constexpr Format kFormat = Format::kFp8RowBf16;
  static constexpr BlockShape kShape = BlockShape::kGroup;
  static constexpr float kLowest = -448, kHighest = 448;

  // Both ways of rounding are computed and the fitting one is taken, so that a loop has no branch.
  [[gnu::always_inline]] static std::uint8_t code_of(float number) {
    const auto u = std::bit_cast<std::uint32_t>(number), a = u & 0x7fffffffu;
    const std::uint32_t small =
        std::bit_cast<std::uint32_t>(std::bit_cast<float>(a) + E4m3::kAligned) -
        std::bit_cast<std::uint32_t>(E4m3::kAligned);
    const std::uint32_t normal = ((a + 0x7ffffu + (a >> 20 & 1)) >> 20) - (120u << 3);
    const bool is_small = a < std::bit_cast<std::uint32_t>(E4m3::kSmallestNormal);
    return static_cast<std::uint8_t>((is_small ? small : normal) | u >> 31 << 7);
  }

  struct NoZero {};
  [[gnu::always_inline]] static NoZero zero_of(const PackedView&, std::size_t, std::size_t) {
    return {};
  }

  template <class V, class T>
  [[gnu::always_inline]] static void decode_group(const std::uint8_t* values, std::size_t col,
                                                  std::size_t count, float scale, NoZero, T* out) {
    constexpr std::size_t lanes = V::template kLanes<T>;
    const std::size_t stop = col + count;
    if (col + lanes <= stop) {
      const auto prepared = prepare<V, T>(scale);
      for (; col + lanes <= stop; col += lanes, out += lanes)
        V::template store<T>(out, decode<V, T>(prepared, values + col));
    }
    for (; col < stop; ++col) *out++ = decode_one<T>(values, col, scale);
  }
};

}  // namespace monograph
