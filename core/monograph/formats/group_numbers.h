// The scale and the zero point of one group of a row as numbers (BlockShape::kGroup).
#pragma once

#include <cstddef>

#include "monograph/formats/packed_view.h"

namespace monograph {

struct GroupNumbers {
  float scale = 0.0f;
  int zero = 0;  // signed; 0 where the format has none
  // Numbers x / scale + zero between these are rounded to a code, further ones clamped: half a step
  // beyond the ends of the codes.
  float lowest = 0.0f, highest = 0.0f;
};

// Of a row and a group of it.
GroupNumbers group_numbers(const PackedView& weight, std::size_t row, std::size_t group);

}  // namespace monograph
