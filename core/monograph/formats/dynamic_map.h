// Double quantisation: the fp32 scales of 4-bit blocks stored as 8-bit codes of the "dynamic" map.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "monograph/cpu/parallel.h"

namespace monograph {

// 256 ascending values from -0.993 to 1.
extern const float kDynamicMap[256];

// The code whose value is nearest to x, by exact comparison; a tie goes to the lower code.
// bitsandbytes' CPU path bins x to 16 bits first and so differs near the midpoints.
std::uint8_t nearest_dynamic_code(float x);

// Ascending: the code of x counts the entries that are not above x. For kernels on other devices.
const std::array<float, 256>& dynamic_bounds();

// Quantises `count` scales in groups of 256:
//   offset = mean of all scales (accumulated in fp64, rounded once to fp32)
//   groups[g] = largest |scale - offset| in the group
//   codes[i] = nearest_dynamic_code((scale[i] - offset) * (1 / groups[g]))
// A group whose scales all equal the offset has groups[g] = 0 and the code of 0.
void double_quantize(const float* scales, std::size_t count, std::uint8_t* codes, float* groups,
                     float* offset, ParallelFor parallel_for);

}  // namespace monograph
