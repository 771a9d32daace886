// What a packing strategy returns, and the strategies. Internal to this folder: pack() has already
// cut the documents into pieces of 1 to capacity tokens.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace monograph {

// The i-th placed piece is order[i] (i itself where order is empty) and went into row row_of[i].
struct Placement {
  std::vector<std::uint32_t> order;
  std::vector<std::uint32_t> row_of;
  std::uint32_t rows = 0;
};

struct RowLimits {
  std::uint32_t capacity;
  std::uint32_t max_documents;
};

Placement best_fit_decreasing(std::span<const std::uint32_t> lengths, RowLimits limits);
Placement first_fit(std::span<const std::uint32_t> lengths, RowLimits limits);

}  // namespace monograph
