// First fit: the spaces of all rows under a tree of maxima, sixteen to a node.
#include <algorithm>
#include <cstddef>

#include "monograph/packing/placement.h"

namespace monograph {
namespace {

// A node is one cache line of sixteen maxima: 6 lines from root to row for 10 million rows, where a
// binary tree has 24.
class RowSpaces {
 public:
  void append(std::uint32_t space) {
    const std::size_t row = rows_++;
    std::size_t entries = rows_;
    for (std::size_t up = 0;; ++up) {
      const std::size_t nodes = (entries + kFan - 1) / kFan;
      if (up == levels_.size()) levels_.push_back(maxima_of_top());
      levels_[up].resize(nodes * kFan);
      if (nodes == 1) break;
      entries = nodes;
    }
    set(row, space);
  }

  void set(std::size_t row, std::uint32_t space) {
    levels_[0][row] = space;
    for (std::size_t up = 1; up < levels_.size(); ++up) {
      const std::uint32_t most = most_of_node(up - 1, row / kFan);
      row /= kFan;
      if (levels_[up][row] == most) return;
      levels_[up][row] = most;
    }
  }

  std::uint32_t space(std::size_t row) const { return levels_[0][row]; }
  std::size_t rows() const { return rows_; }

  // The first row with at least this space (1 or more), or rows().
  std::size_t first_with(std::uint32_t space) const {
    std::size_t node = 0;
    for (std::size_t up = levels_.size(); up-- > 0;) {
      const std::uint32_t* const entry = levels_[up].data() + node * kFan;
      std::size_t child = 0;
      while (child < kFan && entry[child] < space) ++child;
      if (child == kFan) return rows_;  // only at the root: below it a maximum promised one
      node = node * kFan + child;
    }
    return levels_.empty() ? rows_ : node;
  }

 private:
  static constexpr std::size_t kFan = 16;

  std::uint32_t most_of_node(std::size_t level, std::size_t node) const {
    const std::uint32_t* const entry = levels_[level].data() + node * kFan;
    return *std::max_element(entry, entry + kFan);
  }

  std::vector<std::uint32_t> maxima_of_top() const {
    std::vector<std::uint32_t> maxima;
    if (levels_.empty()) return maxima;
    for (std::size_t node = 0; node < levels_.back().size() / kFan; ++node)
      maxima.push_back(most_of_node(levels_.size() - 1, node));
    return maxima;
  }

  std::size_t rows_ = 0;
  // levels_[0] by row; entry i of the next level is the maximum of node i below. Filled up with 0.
  std::vector<std::vector<std::uint32_t>> levels_;
};

}  // namespace

Placement first_fit(std::span<const std::uint32_t> lengths, RowLimits limits) {
  Placement placement;
  placement.row_of.reserve(lengths.size());
  RowSpaces spaces;
  std::vector<std::uint32_t> documents;
  for (const std::uint32_t length : lengths) {
    const std::size_t row = spaces.first_with(length);
    if (row == spaces.rows()) {
      spaces.append(limits.capacity);
      documents.push_back(0);
    }
    const bool full = ++documents[row] == limits.max_documents;
    spaces.set(row, full ? 0 : spaces.space(row) - length);
    placement.row_of.push_back(static_cast<std::uint32_t>(row));
  }
  placement.rows = static_cast<std::uint32_t>(spaces.rows());
  return placement;
}

}  // namespace monograph
