// Looks at every number of a checkpoint.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/weights/weight.h"

namespace monograph::cli {

struct Finding {
  std::string weight;
  std::string_view part;  // "values", "absmax" ...
  std::string_view what;  // "NaN", "infinity", "zero scale"
  std::uint64_t count = 0;
  std::uint64_t first = 0;  // index of the first element, or of the first block
};

// Of plain float weights: NaN and infinities. Of the parts of packed weights: the same in float
// parts, NaN codes in E4M3 and E8M0 scales, and zero scales over codes that are not zero where this
// library can decode. Sorted by weight. `advance` is called with the bytes of each weight.
std::vector<Finding> scan(const std::vector<Weight>& weights, int threads,
                          const std::function<void(std::uint64_t)>& advance);

}  // namespace monograph::cli
