// E2M1 elements, two a byte, the even one in the low nibble: what MXFP4 and NVFP4 share.
#pragma once

#include "monograph/base/minifloat.h"
#include "monograph/formats/table16.h"

namespace monograph {

template <class Self>
struct E2m1Format : Table16Format<Self, Nibbles::kLowFirst> {
  using Element = E2m1;
  static constexpr float kValues[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                        -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
};

}  // namespace monograph
