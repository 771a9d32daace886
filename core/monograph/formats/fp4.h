// FP4 as bitsandbytes stores it: 0, 1/192, 1/6, 1/4, 1/3, 1/2, 2/3, 1 and their negatives, one
// scale a flat block. Not OCP E2M1: other values, another code order. Two codes per byte, the even
// element in the high nibble. Codes 0 and 8 both decode to +0; encoding gives 0 for (-1/384, 0] and
// 8 for (0, 1/384], as bitsandbytes' CPU path does. Otherwise the rules of NF4.
#pragma once

#include "monograph/formats/absmax_scales.h"

namespace monograph {

struct Fp4 : AbsmaxFormat<Fp4> {
  static constexpr Format kFormat = Format::kFp4;
  static constexpr float kValues[16] = {0.0f,
                                        0x1.555556p-8f,
                                        0x1.555556p-1f,
                                        1.0f,
                                        0x1.555556p-2f,
                                        0.5f,
                                        0x1.555556p-3f,
                                        0.25f,
                                        0.0f,
                                        -0x1.555556p-8f,
                                        -0x1.555556p-1f,
                                        -1.0f,
                                        -0x1.555556p-2f,
                                        -0.5f,
                                        -0x1.555556p-3f,
                                        -0.25f};
  // kOrder[i] is the code of the i-th smallest value.
  static constexpr std::uint8_t kOrder[16] = {11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3};
};

}  // namespace monograph
