// NF4 as bitsandbytes stores it. Sixteen values at the quantiles of a normal distribution,
// ascending with the code, -1 and 1 exact. Two codes per byte, the even element in the high nibble;
// flat blocks, one scale (the block's largest magnitude) each.
//   decode: value = kValues[code] * scale, one rounding to fp32, one to the output type.
//   encode: v = x * (1 / scale); the code counts the bounds below v, so a tie goes to the lower
//   code.
// A bound is the midpoint of two neighbours, computed in fp32.
#pragma once

#include "monograph/formats/absmax_scales.h"

namespace monograph {

struct Nf4 : AbsmaxFormat<Nf4> {
  static constexpr Format kFormat = Format::kNf4;
  static constexpr float kValues[16] = {
      -1.0f,           -0x1.647362p-1f, -0x1.0cd66p-1f,  -0x1.946540p-2f,
      -0x1.23449ap-2f, -0x1.7a6a7ep-3f, -0x1.74f0e2p-4f, 0.0f,
      0x1.45f5fep-4f,  0x1.4995c6p-3f,  0x1.f809bap-3f,  0x1.5a0674p-2f,
      0x1.c34970p-2f,  0x1.200f56p-1f,  0x1.722766p-1f,  1.0f};
  // kOrder[i] is the code of the i-th smallest value.
  static constexpr std::uint8_t kOrder[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
};

}  // namespace monograph
