// The scale of a block as bitsandbytes stores it: fp32, or double-quantised through an 8-bit map.
#pragma once

#include "base/float_types.h"
#include "formats/packed_view.h"

namespace monograph {

[[gnu::always_inline]] inline float absmax_scale(const ScalesView& scales, std::size_t block) {
  if (!scales.double_quantised()) return load_f32(scales.blocks + 4 * block);
  const float entry = load_f32(scales.map + 4 * static_cast<std::size_t>(scales.blocks[block]));
  const float product = entry * load_f32(scales.groups + 4 * (block / kScaleGroup));
  return product + scales.offset;
}

}  // namespace monograph
