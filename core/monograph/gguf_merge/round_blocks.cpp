#include "monograph/gguf_merge/round_blocks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "monograph/gguf/encode_blocks.h"
#include "monograph/gguf_merge/block_grid.h"

namespace monograph::gguf {
namespace {

bool keeps_scales(const BlockGrid& grid, std::size_t begin, std::span<const float> values,
                  std::span<const double> merged) {
  double before = 0, after = 0;
  for (std::size_t i = 0; i < merged.size(); ++i) {
    // A value on the grid is kept whatever the grid is: -128 in Q8_0, all zeros.
    if (merged[i] != static_cast<double>(values[i]) && !grid.reaches(begin + i, merged[i])) {
      return false;
    }
    before = std::max(before, std::fabs(static_cast<double>(values[i])));
    after = std::max(after, std::fabs(merged[i]));
  }
  return 2 * after >= before;
}

void to_nearest(const BlockGrid& grid, std::span<const double> merged, std::uint8_t* codes) {
  for (std::size_t i = 0; i < merged.size(); ++i) codes[i] = grid.nearest(i, merged[i]);
}

void with_feedback(const BlockGrid& grid, std::span<const double> merged,
                   const FeedbackRows& feedback, std::uint8_t* codes) {
  const std::size_t directions = feedback.directions;
  std::vector<double> sums(directions);
  for (std::size_t i = 0; i < merged.size(); ++i) {
    const double* c = feedback.c.data() + i * directions;
    const double* g = feedback.g.data() + i * directions;
    double even = 0, odd = 0;
    for (std::size_t d = 0; d < directions; d += 2) {
      even += sums[d] * c[d];
      odd += sums[d + 1] * c[d + 1];
    }
    codes[i] = grid.nearest(i, merged[i] - (even + odd));
    const double error = static_cast<double>(grid.value(i, codes[i])) - merged[i];
    for (std::size_t d = 0; d < directions; ++d) sums[d] += error * g[d];
  }
}

}  // namespace

void round_blocks(TensorType type, std::span<const std::uint8_t> base,
                  std::span<const float> values, std::span<const double> merged,
                  const FeedbackRows& feedback, std::uint8_t* out) {
  const TensorTypeInfo& info = info_of(type);
  const std::size_t count = merged.size() / info.block_elements;
  std::memcpy(out, base.data(), base.size());
  const BlockGrid of_base = block_grid(type, base.data(), count);
  for (std::size_t block = 0; block < count && is_written(type); ++block) {
    const std::size_t begin = block * info.block_elements;
    const auto own = merged.subspan(begin, info.block_elements);
    if (keeps_scales(of_base, begin, values.subspan(begin, info.block_elements), own)) continue;
    const std::vector<float> narrow(own.begin(), own.end());
    encode(type, narrow.data(), narrow.size(), out + block * info.block_bytes);
  }
  const BlockGrid grid = block_grid(type, out, count);
  std::vector<std::uint8_t> codes(merged.size());
  if (feedback.directions != 0) {
    with_feedback(grid, merged, feedback, codes.data());
  } else {
    to_nearest(grid, merged, codes.data());
  }
  set_codes(type, codes.data(), count, out);
}

}  // namespace monograph::gguf
