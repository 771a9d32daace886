// The matrix product of a warp by its definition: see mma in prims.h for what a lane holds.
#pragma once

#include <cstdint>

#include "monograph/base/float_types.h"
#include "monograph/gpu/host/block.h"

namespace monograph::gpu::host {

struct MmaLane {
  float* d;
  const std::uint32_t *a, *b;
};
template <class T>
void mma_by_definition(void* const* lanes) {
  float a[16][16], b[16][8];
  const auto element = [](std::uint32_t pair, unsigned half) {
    return to_float(T{static_cast<std::uint16_t>(pair >> 16 * half)});
  };
  for (unsigned i = 0; i < kWarp; ++i) {
    const MmaLane& lane = *static_cast<const MmaLane*>(lanes[i]);
    const unsigned g = i / 4;
    for (unsigned half = 0; half < 2; ++half) {
      const unsigned k = i % 4 * 2 + half;
      for (unsigned part = 0; part < 4; ++part)
        a[g + part % 2 * 8][k + part / 2 * 8] = element(lane.a[part], half);
      for (unsigned part = 0; part < 2; ++part) b[k + part * 8][g] = element(lane.b[part], half);
    }
  }
  for (unsigned i = 0; i < kWarp; ++i)
    for (unsigned part = 0; part < 4; ++part) {
      float& d = static_cast<const MmaLane*>(lanes[i])->d[part];
      const unsigned row = i / 4 + part / 2 * 8, col = i % 4 * 2 + part % 2;
      for (unsigned k = 0; k < 16; ++k) d += a[row][k] * b[k][col];
    }
}

}  // namespace monograph::gpu::host
