// How an element is divided by its block's scale before it is rounded to a code.
#pragma once

namespace monograph {

// v = x * factor or x / factor, rounded to fp32, then v + zero. Adding -0 changes nothing; adding
// +0 drops the sign of a zero, as producers do that look at v < 0 instead of the sign bit.
struct Scaling {
  float factor = 1.0f;
  bool divide = false;
  float zero = -0.0f;
};

}  // namespace monograph
