// Best fit decreasing in time linear in documents and rows: a counting sort, then one pass over the
// distinct lengths.
#include <algorithm>

#include "monograph/packing/placement.h"
#include "monograph/packing/space_set.h"

namespace monograph {
namespace {

constexpr std::uint32_t kNone = 0xffffffff;

// Rows by their space: a first-in first-out list for each space, linked through `next_`.
class BestFit {
 public:
  BestFit(RowLimits limits, std::uint32_t* row_of)
      : limits_(limits),
        spaces_(limits.capacity),
        first_(std::size_t{limits.capacity} + 1, kNone),
        last_(std::size_t{limits.capacity} + 1, kNone),
        row_of_(row_of) {}

  // The next `count` documents, all of this length. Placing them one by one gives the same: once
  // the tightest row has taken one and can take another, it is the tightest again.
  void place(std::uint32_t length, std::uint32_t count) {
    while (count > 0) {
      const std::uint32_t tightest = spaces_.at_least(length);
      const std::uint32_t row = tightest == 0 ? open_row() : take(tightest);
      const std::uint32_t space = tightest == 0 ? limits_.capacity : tightest;
      const std::uint32_t taken =
          std::min({count, space / length, limits_.max_documents - documents_[row]});
      row_of_ = std::fill_n(row_of_, taken, row);
      documents_[row] += taken;
      count -= taken;
      if (documents_[row] < limits_.max_documents) put(space - taken * length, row);
    }
  }

  std::uint32_t rows() const { return static_cast<std::uint32_t>(next_.size()); }

 private:
  std::uint32_t open_row() {
    next_.push_back(kNone);
    documents_.push_back(0);
    return rows() - 1;
  }

  std::uint32_t take(std::uint32_t space) {
    const std::uint32_t row = first_[space];
    first_[space] = next_[row];
    if (first_[space] == kNone) spaces_.erase(space);
    return row;
  }

  void put(std::uint32_t space, std::uint32_t row) {
    if (space == 0) return;
    next_[row] = kNone;
    if (first_[space] == kNone) {
      first_[space] = row;
      spaces_.insert(space);
    } else {
      next_[last_[space]] = row;
    }
    last_[space] = row;
  }

  RowLimits limits_;
  SpaceSet spaces_;
  std::vector<std::uint32_t> first_, last_;      // by space
  std::vector<std::uint32_t> next_, documents_;  // by row
  std::uint32_t* row_of_;
};

}  // namespace

Placement best_fit_decreasing(std::span<const std::uint32_t> lengths, RowLimits limits) {
  std::vector<std::uint32_t> count(std::size_t{limits.capacity} + 1), position(count.size());
  for (const std::uint32_t length : lengths) ++count[length];
  std::uint32_t before = 0;
  for (std::uint32_t length = limits.capacity; length > 0; --length) {
    position[length] = before;
    before += count[length];
  }
  Placement placement;
  placement.order.resize(lengths.size());
  placement.row_of.resize(lengths.size());
  for (std::uint32_t i = 0; i < lengths.size(); ++i) placement.order[position[lengths[i]]++] = i;
  BestFit rows(limits, placement.row_of.data());
  for (std::uint32_t length = limits.capacity; length > 0; --length)
    rows.place(length, count[length]);
  placement.rows = rows.rows();
  return placement;
}

}  // namespace monograph
