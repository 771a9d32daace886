// MXFP4 of the OCP microscaling standard: E2M1 elements, the even one in the low nibble, and one
// E8M0 scale for 32 elements of a row; rows are a multiple of 32. As in gpt-oss checkpoints
// (`*_blocks`, `*_scales`), compressed-tensors (`weight_packed`, `weight_scale`) and torchao.
//   decode: value(code) * 2^(b - 127): exact in fp32 but for results below 2^-126 or above its
//   range.
//   encode: x * 2^(127 - b), rounded to the nearest E2M1, ties to even, saturating; the sign of a
//   zero is kept. The rules for b stand in mx_scales.h. Default: even.
#pragma once

#include "monograph/formats/e2m1_table.h"
#include "monograph/formats/mx_scales.h"
#include "monograph/formats/scaling.h"

namespace monograph {

struct Mxfp4 : E2m1Format<Mxfp4> {
  static constexpr Format kFormat = Format::kMxfp4;
  static constexpr BlockShape kShape = BlockShape::kRow;
  static constexpr std::size_t kBlock = 32;

  [[gnu::always_inline]] static float block_scale(const PackedView& weight, std::size_t block) {
    return e8m0_value(weight.scales.blocks[block]);
  }

  [[gnu::always_inline]] static BlockScale choose_scale(const RuleContext& context, float absmax) {
    const std::uint8_t b = mx_scale<E2m1>(context.rule, absmax);
    return {b, {e8m0_reciprocal(b), /*divide=*/false, -0.0f}};
  }
};

}  // namespace monograph
