#include "monograph/gguf_merge/round_blocks.h"

#include <algorithm>
#include <array>
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

// Columns that are turned at once: rows of a power of two would meet in one place of the cache.
constexpr std::size_t kTile = 64;

// A tile of the rows of a group, its columns one behind the other.
struct Turned {
  std::vector<double> wanted = std::vector<double>(kTile * kFeedbackLanes);
  std::vector<std::uint8_t> codes = std::vector<std::uint8_t>(kTile * kFeedbackLanes);
  BlockGrid grid;

  explicit Turned(const BlockGrid& whole) : grid{{}, {}, whole.lowest, whole.codes, whole.levels} {
    grid.scale.resize(kTile * kFeedbackLanes);
    grid.minimum.resize(kTile * kFeedbackLanes);
  }
};

// At most kFeedbackLanes rows of one matrix.
void with_feedback(const BlockGrid& grid, std::span<const double> wanted, std::size_t rows,
                   const FeedbackRows& feedback, FeedbackStepFn* step, std::uint8_t* codes) {
  const std::size_t directions = feedback.directions, cols = wanted.size() / rows;
  std::vector<double> sums(directions * kFeedbackLanes);
  std::array<double, kFeedbackLanes> errors{}, corrections{};
  Turned tile(grid);
  for (std::size_t begin = 0; begin < cols; begin += kTile) {
    const std::size_t width = std::min(kTile, cols - begin);
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t i = 0; i < width; ++i) {
        const std::size_t to = i * kFeedbackLanes + row, from = row * cols + begin + i;
        tile.wanted[to] = wanted[from];
        tile.grid.scale[to] = grid.scale[from];
        tile.grid.minimum[to] = grid.minimum[from];
      }
    }
    for (std::size_t i = 0; i < width; ++i) {
      for (std::size_t row = 0; row < rows; ++row) {
        const std::size_t at = i * kFeedbackLanes + row;
        const std::uint8_t code = tile.grid.nearest(at, tile.wanted[at] - corrections[row]);
        errors[row] = static_cast<double>(tile.grid.value(at, code)) - tile.wanted[at];
        tile.codes[at] = code;
      }
      const std::size_t column = begin + i;
      step({directions, feedback.g.data() + column * directions,
            feedback.c.data() + (column + 1) * directions, errors.data(), sums.data(),
            corrections.data()});
    }
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t i = 0; i < width; ++i) {
        codes[row * cols + begin + i] = tile.codes[i * kFeedbackLanes + row];
      }
    }
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
  set_rounded_codes(type, merged, 1, feedback, out);
}

void set_rounded_codes(TensorType type, std::span<const double> wanted, std::size_t rows,
                       const FeedbackRows& feedback, std::uint8_t* blocks) {
  const TensorTypeInfo& info = info_of(type);
  const std::size_t cols = wanted.size() / rows, row_blocks = cols / info.block_elements;
  FeedbackStepFn* step = pick(feedback_step_variants());
  std::vector<std::uint8_t> codes;
  for (std::size_t begin = 0; begin < rows; begin += kFeedbackLanes) {
    const std::size_t count = std::min(kFeedbackLanes, rows - begin);
    const auto own = wanted.subspan(begin * cols, count * cols);
    std::uint8_t* out = blocks + begin * row_blocks * info.block_bytes;
    const BlockGrid grid = block_grid(type, out, count * row_blocks);
    codes.resize(own.size());
    if (feedback.directions != 0) {
      with_feedback(grid, own, count, feedback, step, codes.data());
    } else {
      for (std::size_t i = 0; i < own.size(); ++i) codes[i] = grid.nearest(i, own[i]);
    }
    set_codes(type, codes.data(), count * row_blocks, out);
  }
}

}  // namespace monograph::gguf
