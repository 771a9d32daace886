// Cuts documents into pieces, has a strategy place them, and lists the rows.
#include "monograph/packing/packing.h"

#include <algorithm>
#include <limits>
#include <string>

#include "monograph/base/error.h"
#include "monograph/packing/placement.h"

namespace monograph {
namespace {

struct Pieces {
  std::vector<std::uint32_t> lengths;    // 1 to capacity
  std::vector<std::uint32_t> documents;  // which document each is of
};

// 2^32 - 1 stands for "none" in the lists of best fit.
constexpr std::int64_t kMostPieces = std::numeric_limits<std::uint32_t>::max() - 1;

// One wrong length must not ask for all memory: 16 million rows of one document.
constexpr std::int64_t kMostOfOne = std::int64_t{1} << 24;

// The number of pieces, after every length has been checked.
std::int64_t count_pieces(std::span<const std::int64_t> lengths, const PackOptions& options) {
  std::int64_t pieces = 0;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    const std::int64_t length = lengths[i];
    if (length < 0)
      throw Error("pack: document " + std::to_string(i) + " has length " + std::to_string(length) +
                  ", wanted 0 or more");
    if (length > options.capacity && options.overlong == Overlong::kRefuse)
      throw Error("pack: document " + std::to_string(i) + " has length " + std::to_string(length) +
                  ", a row has " + std::to_string(options.capacity) +
                  "; truncating and splitting are the alternatives to refusing it");
    const bool split = options.overlong == Overlong::kSplit;
    const std::int64_t more = length == 0 ? 0 : split ? (length - 1) / options.capacity + 1 : 1;
    if (more > kMostOfOne)
      throw Error("pack: document " + std::to_string(i) + " has length " + std::to_string(length) +
                  ", which splits into " + std::to_string(more) + " pieces, wanted at most " +
                  std::to_string(kMostOfOne));
    if (more > kMostPieces - pieces || i > static_cast<std::size_t>(kMostPieces))
      throw Error("pack: more than " + std::to_string(kMostPieces) + " documents or pieces");
    pieces += more;
  }
  return pieces;
}

Pieces cut(std::span<const std::int64_t> lengths, const PackOptions& options) {
  Pieces pieces;
  const auto count = static_cast<std::size_t>(count_pieces(lengths, options));
  pieces.lengths.reserve(count);
  pieces.documents.reserve(count);
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    for (std::int64_t left = lengths[i]; left > 0; left -= options.capacity) {
      pieces.lengths.push_back(static_cast<std::uint32_t>(std::min(left, options.capacity)));
      pieces.documents.push_back(static_cast<std::uint32_t>(i));
      if (options.overlong != Overlong::kSplit) break;
    }
  }
  return pieces;
}

// Token at which each piece starts: pieces of one document follow each other.
std::vector<std::int64_t> starts_of(const Pieces& pieces, std::int64_t capacity) {
  std::vector<std::int64_t> starts(pieces.documents.size());
  for (std::size_t i = 1; i < starts.size(); ++i)
    if (pieces.documents[i] == pieces.documents[i - 1]) starts[i] = starts[i - 1] + capacity;
  return starts;
}

std::vector<std::int64_t> row_offsets(const Placement& placement) {
  std::vector<std::int64_t> offsets(std::size_t{placement.rows} + 1);
  for (const std::uint32_t row : placement.row_of) ++offsets[row + 1];
  for (std::size_t row = 0; row < placement.rows; ++row) offsets[row + 1] += offsets[row];
  return offsets;
}

Packing list_rows(const Pieces& pieces, const Placement& placement, const PackOptions& options) {
  Packing packing;
  packing.row_offsets = row_offsets(placement);
  packing.documents.resize(pieces.documents.size());
  std::vector<std::int64_t> starts;
  if (options.overlong == Overlong::kSplit) {
    starts = starts_of(pieces, options.capacity);
    packing.starts.resize(starts.size());
  }
  std::vector<std::int64_t> slot_of = packing.row_offsets;  // where the next piece of a row goes
  for (std::size_t i = 0; i < placement.row_of.size(); ++i) {
    const std::size_t piece = placement.order.empty() ? i : placement.order[i];
    const auto slot = static_cast<std::size_t>(slot_of[placement.row_of[i]]++);
    packing.documents[slot] = pieces.documents[piece];
    if (!starts.empty()) packing.starts[slot] = starts[piece];
  }
  return packing;
}

}  // namespace

Packing pack(std::span<const std::int64_t> lengths, const PackOptions& options) {
  MONOGRAPH_ASSERT(options.capacity >= 1 && options.capacity <= kLargestCapacity);
  MONOGRAPH_ASSERT(options.max_documents >= 1);
  const Pieces pieces = cut(lengths, options);
  const RowLimits limits = {
      static_cast<std::uint32_t>(options.capacity),
      // A row never holds more pieces than tokens.
      static_cast<std::uint32_t>(std::min(options.max_documents, options.capacity))};
  const Placement placement = options.strategy == PackStrategy::kFirstFit
                                  ? first_fit(pieces.lengths, limits)
                                  : best_fit_decreasing(pieces.lengths, limits);
  return list_rows(pieces, placement, options);
}

}  // namespace monograph
