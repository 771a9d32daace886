#include <algorithm>
#include <array>
#include <cmath>

#include "monograph/formats/dynamic_map.h"
#include "monograph/formats/packed_view.h"

namespace monograph {
namespace {

// Keeps the reciprocal finite; a group of equal scales then gets the code of 0.
constexpr float kSmallestGroup = 1e-38f;

// bounds[i] is the smallest float nearer to map[i + 1] than to map[i]; the last entry is never
// reached.
std::array<float, 256> make_bounds() {
  std::array<float, 256> bounds;
  bounds.back() = INFINITY;
  for (std::size_t i = 0; i < 255; ++i) {
    // The sum of two neighbours is exact in fp64, and so is the comparison.
    const double twice =
        static_cast<double>(kDynamicMap[i]) + static_cast<double>(kDynamicMap[i + 1]);
    float bound = static_cast<float>(twice / 2);
    while (2.0 * static_cast<double>(bound) > twice) bound = std::nextafter(bound, -2.0f);
    while (2.0 * static_cast<double>(bound) <= twice) bound = std::nextafter(bound, 2.0f);
    bounds[i] = bound;
  }
  return bounds;
}

// Eight steps without a branch: neighbouring searches overlap.
std::uint8_t search(const std::array<float, 256>& bounds, float x) {
  std::size_t index = 0;
  for (std::size_t width = 128; width != 0; width /= 2)
    index += width * static_cast<std::size_t>(x >= bounds[index + width - 1]);
  return static_cast<std::uint8_t>(index);
}

}  // namespace

const std::array<float, 256>& dynamic_bounds() {
  static const std::array<float, 256> table = make_bounds();
  return table;
}

std::uint8_t nearest_dynamic_code(float x) { return search(dynamic_bounds(), x); }

void double_quantize(const float* scales, std::size_t count, std::uint8_t* codes, float* groups,
                     float* offset, ParallelFor parallel_for) {
  double sum = 0.0;  // in order, whatever the threads
  for (std::size_t i = 0; i < count; ++i) sum += static_cast<double>(scales[i]);
  const float mean = count == 0 ? 0.0f : static_cast<float>(sum / static_cast<double>(count));
  *offset = mean;
  const std::array<float, 256>& table = dynamic_bounds();
  parallel_for(ceil_div(count, kScaleGroup), 16, [&](std::size_t first, std::size_t last) {
    for (std::size_t group = first; group < last; ++group) {
      const std::size_t begin = group * kScaleGroup, end = std::min(begin + kScaleGroup, count);
      float largest = 0.0f;
      for (std::size_t i = begin; i < end; ++i)
        largest = std::max(largest, std::fabs(scales[i] - mean));
      groups[group] = largest;
      const float inverse = 1.0f / std::max(largest, kSmallestGroup);
      for (std::size_t i = begin; i < end; ++i)
        codes[i] = search(table, (scales[i] - mean) * inverse);
    }
  });
}

}  // namespace monograph
