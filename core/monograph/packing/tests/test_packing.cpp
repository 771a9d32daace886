// pack and place against searches over all rows, over every small input and over random large ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "monograph/base/error.h"
#include "monograph/packing/packing.h"
#include "monograph/packing/space_set.h"

namespace monograph {
namespace {

using Lengths = std::vector<std::int64_t>;

struct Piece {
  std::int64_t document, start, length;
  bool operator==(const Piece&) const = default;
};
using Rows = std::vector<std::vector<Piece>>;

std::vector<Piece> pieces_by_hand(const Lengths& lengths, const PackOptions& options) {
  std::vector<Piece> pieces;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(lengths.size()); ++i) {
    for (std::int64_t start = 0; start < lengths[i]; start += options.capacity) {
      if (start > 0 && options.overlong != Overlong::kSplit) break;
      pieces.push_back({i, start, std::min(options.capacity, lengths[i] - start)});
    }
  }
  return pieces;
}

// Searches all rows for each piece. `since` is when a row came to have its present space.
Rows packed_by_search(const Lengths& lengths, const PackOptions& options) {
  std::vector<Piece> pieces = pieces_by_hand(lengths, options);
  const bool best = options.strategy == PackStrategy::kBestFitDecreasing;
  if (best)
    std::stable_sort(pieces.begin(), pieces.end(),
                     [](const Piece& a, const Piece& b) { return a.length > b.length; });
  struct State {
    std::int64_t space, since;
  };
  std::vector<State> states;
  Rows rows;
  std::int64_t now = 0;
  for (const Piece& piece : pieces) {
    std::size_t chosen = rows.size();
    for (std::size_t row = 0; row < rows.size(); ++row) {
      if (states[row].space < piece.length ||
          static_cast<std::int64_t>(rows[row].size()) >= options.max_documents)
        continue;
      if (chosen == rows.size() || (best && (states[row].space < states[chosen].space ||
                                             (states[row].space == states[chosen].space &&
                                              states[row].since < states[chosen].since))))
        chosen = row;
    }
    if (chosen == rows.size()) {
      rows.emplace_back();
      states.push_back({options.capacity, now});
    }
    rows[chosen].push_back(piece);
    states[chosen] = {states[chosen].space - piece.length, ++now};
  }
  return rows;
}

Rows rows_of(const Packing& packing, const Lengths& lengths, std::int64_t capacity) {
  Rows rows;
  for (std::size_t row = 0; row + 1 < packing.row_offsets.size(); ++row) {
    rows.emplace_back();
    for (auto p = static_cast<std::size_t>(packing.row_offsets[row]);
         p < static_cast<std::size_t>(packing.row_offsets[row + 1]); ++p) {
      const std::int64_t document = packing.documents[p];
      const std::int64_t start = packing.starts.empty() ? 0 : packing.starts[p];
      rows.back().push_back(
          {document, start,
           std::min(capacity, lengths[static_cast<std::size_t>(document)] - start)});
    }
  }
  return rows;
}

void check_against_search(const Lengths& lengths, const PackOptions& options) {
  const Rows got = rows_of(pack(lengths, options), lengths, options.capacity);
  ASSERT_EQ(got, packed_by_search(lengths, options))
      << "capacity " << options.capacity << ", max_documents " << options.max_documents
      << ", strategy " << static_cast<int>(options.strategy) << ", lengths "
      << ::testing::PrintToString(lengths);
}

constexpr PackStrategy kStrategies[] = {PackStrategy::kBestFitDecreasing, PackStrategy::kFirstFit};

TEST(Pack, EveryInputOfUpToFiveDocumentsMatchesTheSearch) {
  // Lengths 0 to 5 with capacities 1 to 4: empty, exact, overlong once and more than once.
  for (std::size_t documents = 0; documents <= 5; ++documents) {
    Lengths lengths(documents);
    for (bool more = true; more;) {
      for (const PackStrategy strategy : kStrategies)
        for (std::int64_t capacity = 1; capacity <= 4; ++capacity)
          check_against_search(lengths, {capacity, kAnyNumber, strategy, Overlong::kSplit});
      check_against_search(lengths, {4, 2, kStrategies[documents % 2], Overlong::kTruncate});
      more = false;  // the next combination, as an odometer
      for (std::size_t i = 0; i < documents && !more; ++i) {
        more = ++lengths[i] <= 5;
        if (!more) lengths[i] = 0;
      }
    }
    if (::testing::Test::HasFatalFailure()) return;
  }
}

Lengths random_lengths(std::mt19937& random, std::size_t count, double mean) {
  std::lognormal_distribution<double> length(std::log(mean) - 0.5, 1.0);
  Lengths lengths(count);
  for (std::int64_t& l : lengths) l = static_cast<std::int64_t>(length(random));
  return lengths;
}

TEST(Pack, RandomInputsMatchTheSearch) {
  std::mt19937 random(11);
  for (int round = 0; round < 60; ++round) {
    const auto capacity = static_cast<std::int64_t>(std::uniform_int_distribution(1, 5000)(random));
    const Lengths lengths = random_lengths(random, 1 + random() % 900, double(capacity) / 6 + 2);
    for (const PackStrategy strategy : kStrategies)
      for (const Overlong overlong : {Overlong::kTruncate, Overlong::kSplit})
        for (const std::int64_t most : {kAnyNumber, std::int64_t{7}, std::int64_t{1}})
          check_against_search(lengths, {capacity, most, strategy, overlong});
    if (::testing::Test::HasFatalFailure()) return;
  }
}

// Enough rows for four levels of the tree of first fit, and a capacity with four of the bitmap.
TEST(Pack, LargeInputsHoldEveryTokenOnceAndNoRowTooMany) {
  std::mt19937 random(12);
  const Lengths lengths = random_lengths(random, 200'000, 350);
  for (const PackStrategy strategy : kStrategies) {
    for (const std::int64_t capacity : {std::int64_t{512}, std::int64_t{4096}, kLargestCapacity}) {
      const PackOptions options = {capacity, 20, strategy, Overlong::kSplit};
      const Rows rows = rows_of(pack(lengths, options), lengths, capacity);
      Lengths seen(lengths.size());
      for (const auto& row : rows) {
        std::int64_t tokens = 0;
        for (const Piece& piece : row) {
          tokens += piece.length;
          seen[static_cast<std::size_t>(piece.document)] += piece.length;
        }
        ASSERT_LE(tokens, capacity);
        ASSERT_GE(row.size(), 1u);
        ASSERT_LE(row.size(), 20u);
      }
      ASSERT_EQ(seen, lengths);
      const Rows again = rows_of(pack(lengths, options), lengths, capacity);
      ASSERT_EQ(rows, again);
    }
  }
}

TEST(Pack, NoTwoRowsOfFirstFitCouldBeOne) {
  // What a packer that only ever opens a row when it must guarantees: at most one row is half
  // empty.
  std::mt19937 random(13);
  for (const PackStrategy strategy : kStrategies) {
    const Lengths lengths = random_lengths(random, 5000, 300);
    const Rows rows =
        rows_of(pack(lengths, {2048, kAnyNumber, strategy, Overlong::kTruncate}), lengths, 2048);
    int half_empty = 0;
    for (const auto& row : rows) {
      std::int64_t tokens = 0;
      for (const Piece& piece : row) tokens += piece.length;
      half_empty += 2 * tokens <= 2048;
    }
    EXPECT_LE(half_empty, 1);
  }
}

TEST(Pack, EmptyDocumentsHaveNoPiece) {
  const Packing packing = pack(Lengths{0, 3, 0, 0, 2}, {4});
  EXPECT_EQ(packing.documents, (Lengths{1, 4}));
  EXPECT_EQ(packing.row_offsets, (Lengths{0, 1, 2}));
  EXPECT_TRUE(packing.starts.empty());
  EXPECT_EQ(pack(Lengths{0, 0}, {4}).row_offsets, (Lengths{0}));
  EXPECT_EQ(pack(Lengths{}, {4}).row_offsets, (Lengths{0}));
}

std::string message_of(const Lengths& lengths, const PackOptions& options) {
  try {
    pack(lengths, options);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(Pack, ErrorsNameTheDocumentAndItsLength) {
  EXPECT_EQ(message_of({1, -3}, {4}), "pack: document 1 has length -3, wanted 0 or more");
  EXPECT_EQ(message_of({4, 1, 5}, {4}),
            "pack: document 2 has length 5, a row has 4; truncating and splitting are the "
            "alternatives to refusing it");
  PackOptions split = {1};
  split.overlong = Overlong::kSplit;
  EXPECT_EQ(
      message_of({1, std::numeric_limits<std::int64_t>::max()}, split),
      "pack: document 1 has length 9223372036854775807, which splits into 9223372036854775807 "
      "pieces, wanted at most 16777216");
  EXPECT_EQ(message_of(Lengths(256, 1 << 24), split),
            "pack: more than 4294967294 documents or pieces");
  EXPECT_EQ(message_of({1, 4}, {4}), "no error");
}

TEST(SpaceSet, FindsTheLeastMemberAtOrAboveLikeAnOrderedSet) {
  std::mt19937 random(14);
  for (const std::uint32_t largest : {1u, 63u, 64u, 65u, 4095u, 4096u, 300'000u}) {
    SpaceSet spaces(largest);
    std::set<std::uint32_t> members;
    std::uniform_int_distribution<std::uint32_t> any(1, largest);
    for (int step = 0; step < 4000; ++step) {
      const std::uint32_t value = any(random);
      if (members.insert(value).second) {
        spaces.insert(value);
      } else {
        members.erase(value);
        spaces.erase(value);
      }
      const std::uint32_t wanted = any(random);
      const auto found = members.lower_bound(wanted);
      ASSERT_EQ(spaces.at_least(wanted), found == members.end() ? 0 : *found) << largest;
    }
  }
}

// The rule of place() with every row ever opened kept in a list.
struct StreamBySearch {
  std::int64_t capacity, max_documents, max_open;
  struct Row {
    std::int64_t space, documents;
    bool open;
  };
  std::vector<Row> rows = {};
  std::vector<std::int64_t> closed = {};

  void close(std::size_t row) {
    rows[row].open = false;
    closed.push_back(static_cast<std::int64_t>(row));
  }
  std::size_t tightest(std::int64_t length) const {
    std::size_t best = rows.size();
    for (std::size_t i = rows.size(); i-- > 0;)  // backwards, so that the oldest of equals stays
      if (rows[i].open && rows[i].space >= length &&
          (best == rows.size() || rows[i].space <= rows[best].space))
        best = i;
    return best;
  }
  std::int64_t place(std::int64_t length) {
    std::size_t row = tightest(length);
    if (row == rows.size()) {
      if (std::count_if(rows.begin(), rows.end(), [](const Row& r) { return r.open; }) == max_open)
        close(tightest(0));
      row = rows.size();
      rows.push_back({capacity, 0, true});
    }
    rows[row].space -= length;
    if (++rows[row].documents == max_documents || rows[row].space == 0) close(row);
    return static_cast<std::int64_t>(row);
  }
};

TEST(PackStream, MatchesTheSearchForEveryNumberOfOpenRows) {
  std::mt19937 random(15);
  for (const std::int64_t max_open : {1, 2, 3, 8, 50}) {
    for (const std::int64_t most : {kAnyNumber, std::int64_t{3}, std::int64_t{1}}) {
      PackStream stream = {100, most, max_open, 0, {}};
      StreamBySearch search = {100, most, max_open};
      Lengths closed;
      for (int i = 0; i < 500; ++i) {
        const std::int64_t length = 1 + random() % (i % 2 ? 100 : 30);
        ASSERT_EQ(place(stream, length, closed), search.place(length));
        ASSERT_LE(static_cast<std::int64_t>(stream.open.size()), max_open);
        ASSERT_EQ(closed, search.closed);
      }
      ASSERT_EQ(closed.size() + stream.open.size(), search.rows.size());
    }
  }
}

}  // namespace
}  // namespace monograph
