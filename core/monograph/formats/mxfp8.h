// MXFP8 of the OCP microscaling standard: E4M3 elements and one E8M0 scale for 32 elements of a
// row; rows are a multiple of 32. As in compressed-tensors and ModelOpt (`weight`, `weight_scale`),
// TransformerEngine (row-wise) and torchao.
//   decode: value(code) * 2^(b - 127): exact in fp32 but for results below 2^-126 or above its
//   range.
//   encode: x * 2^(127 - b), rounded to the nearest E4M3, ties to even, saturating at 448. The
//   rules for b stand in mx_scales.h. Default: rceil.
#pragma once

#include "monograph/formats/e4m3_bytes.h"
#include "monograph/formats/mx_scales.h"
#include "monograph/formats/packed_view.h"
#include "monograph/formats/scaling.h"

namespace monograph {

struct Mxfp8 : E4m3Format<Mxfp8> {
  static constexpr Format kFormat = Format::kMxfp8;
  static constexpr BlockShape kShape = BlockShape::kRow;
  static constexpr std::size_t kBlock = 32;

  [[gnu::always_inline]] static float block_scale(const PackedView& weight, std::size_t block) {
    return e8m0_value(weight.scales.blocks[block]);
  }

  // A power of two needs no rounding, and there is a new one for every 32 elements.
  template <class V, class T>
  [[gnu::always_inline]] static auto prepare(float scale) {
    if constexpr (sizeof(T) == 2 && requires { V::template e8m0_scale<T>(scale); })
      return V::template e8m0_scale<T>(scale);
    else
      return V::template e4m3_scale<T>(scale);
  }

  [[gnu::always_inline]] static BlockScale choose_scale(const RuleContext& context, float absmax) {
    const std::uint8_t b = mx_scale<E4m3>(context.rule, absmax);
    return {b, {e8m0_reciprocal(b), /*divide=*/false, -0.0f}};
  }
};

}  // namespace monograph
