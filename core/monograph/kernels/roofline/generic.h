// Both loops, written once for each vocabulary that has the instructions.
#pragma once

#include <cstring>

#include "monograph/kernels/roofline/roofline.h"

namespace monograph {

template <class V>
void move_with(const std::uint8_t* in, std::size_t in_bytes, std::uint8_t* out,
               std::size_t out_bytes) {
  const std::size_t repeat = in_bytes < 16 ? 0 : out_bytes / (in_bytes / 16 * 16);
  std::size_t o = 0;
  for (std::size_t i = 0; i + 16 <= in_bytes; i += 16)
    for (std::size_t r = 0; r < repeat && o + 16 <= out_bytes; ++r, o += 16)
      std::memcpy(out + o, in + i, 16);
}

template <class V>
double tile_products_with(std::size_t steps);

}  // namespace monograph
