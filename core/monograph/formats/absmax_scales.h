// The scale of a block as bitsandbytes stores it: fp32, or double-quantised through an 8-bit map.
#pragma once

#include "monograph/base/float_types.h"
#include "monograph/formats/packed_view.h"
#include "monograph/formats/table16.h"

namespace monograph {

[[gnu::always_inline]] inline float absmax_scale(const ScalesView& scales, std::size_t block) {
  if (!scales.double_quantised()) return load_f32(scales.blocks + 4 * block);
  const float entry = load_f32(scales.map + 4 * static_cast<std::size_t>(scales.blocks[block]));
  const float product = entry * load_f32(scales.groups + 4 * (block / kScaleGroup));
  return product + scales.offset;
}

// A table of sixteen values in [-1, 1], the even element in the high nibble, flat blocks.
template <class Self>
struct AbsmaxFormat : Table16Format<Self, Nibbles::kHighFirst> {
  static constexpr BlockShape kShape = BlockShape::kFlat;
  static constexpr std::size_t kBlock = 0;  // any that the table of formats allows

  [[gnu::always_inline]] static float block_scale(const PackedView& weight, std::size_t block) {
    return absmax_scale(weight.scales, block);
  }
};

}  // namespace monograph
