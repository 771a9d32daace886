#include <algorithm>
#include <cmath>

#include "formats/dynamic_map.h"
#include "formats/packed_view.h"

namespace monograph {
namespace {

// Keeps the reciprocal finite; a group of equal scales then gets the code of 0.
constexpr float kSmallestGroup = 1e-38f;

}  // namespace

std::uint8_t nearest_dynamic_code(float x) {
  const float* const end = kDynamicMap + 256;
  const float* const above = std::lower_bound(kDynamicMap, end, x);
  if (above == kDynamicMap) return 0;
  if (above == end) return 255;
  // Sums of two fp32 neighbours of the map are exact in fp64.
  const double middle = static_cast<double>(above[-1]) + static_cast<double>(above[0]);
  const auto index = static_cast<std::size_t>(above - kDynamicMap);
  return static_cast<std::uint8_t>(2.0 * static_cast<double>(x) > middle ? index : index - 1);
}

void double_quantize(const float* scales, std::size_t count, std::uint8_t* codes, float* groups,
                     float* offset) {
  double sum = 0.0;
  for (std::size_t i = 0; i < count; ++i) sum += static_cast<double>(scales[i]);
  *offset = count == 0 ? 0.0f : static_cast<float>(sum / static_cast<double>(count));
  for (std::size_t begin = 0; begin < count; begin += kScaleGroup) {
    const std::size_t end = std::min(begin + kScaleGroup, count);
    float largest = 0.0f;
    for (std::size_t i = begin; i < end; ++i)
      largest = std::max(largest, std::fabs(scales[i] - *offset));
    groups[begin / kScaleGroup] = largest;
    const float inverse = 1.0f / std::max(largest, kSmallestGroup);
    for (std::size_t i = begin; i < end; ++i)
      codes[i] = nearest_dynamic_code((scales[i] - *offset) * inverse);
  }
}

}  // namespace monograph
