// Best fit among a bounded number of open rows, for data whose end is not known.
#include <cstddef>

#include "monograph/base/error.h"
#include "monograph/packing/packing.h"

namespace monograph {
namespace {

// Index of the open row with the least space that is at least `length`, the oldest of equals; the
// number of open rows if there is none.
std::size_t tightest(const std::vector<OpenRow>& open, std::int64_t length) {
  std::size_t best = open.size();
  for (std::size_t i = 0; i < open.size(); ++i)
    if (open[i].space >= length && (best == open.size() || open[i].space < open[best].space))
      best = i;
  return best;
}

void close(PackStream& stream, std::size_t index, std::vector<std::int64_t>& closed) {
  closed.push_back(stream.open[index].row);
  stream.open.erase(stream.open.begin() + static_cast<std::ptrdiff_t>(index));
}

}  // namespace

std::int64_t place(PackStream& stream, std::int64_t length, std::vector<std::int64_t>& closed) {
  MONOGRAPH_ASSERT(length >= 1 && length <= stream.capacity);
  MONOGRAPH_ASSERT(stream.max_documents >= 1 && stream.max_open >= 1);
  std::size_t index = tightest(stream.open, length);
  if (index == stream.open.size()) {
    // A length of 0 fits everywhere, so this is the row with the least space of all.
    if (static_cast<std::int64_t>(index) >= stream.max_open)
      close(stream, tightest(stream.open, 0), closed);
    index = stream.open.size();
    stream.open.push_back({stream.next_row++, stream.capacity, 0});
  }
  OpenRow& row = stream.open[index];
  const std::int64_t number = row.row;
  row.space -= length;
  ++row.documents;
  if (row.space == 0 || row.documents == stream.max_documents) close(stream, index, closed);
  return number;
}

}  // namespace monograph
