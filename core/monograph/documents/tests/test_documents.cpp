// Offsets, gaps, and documents as units of work.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "monograph/base/error.h"
#include "monograph/cpu/dynamic_schedule.h"
#include "monograph/cpu/parallel.h"
#include "monograph/documents/documents.h"
#include "monograph/documents/heads_view.h"
#include "monograph/documents/work_units.h"

namespace monograph {
namespace {

std::string error_of(const std::vector<std::int32_t>& offsets, std::size_t tokens) {
  try {
    check_offsets("layer", "offsets", offsets.data(), offsets.size() - 1, tokens);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(Documents, OffsetsAreRefusedByName) {
  EXPECT_EQ(error_of({0, 3, 3, 9}, 9), "");
  EXPECT_EQ(error_of({2}, 9), "");
  EXPECT_EQ(error_of({-1, 3}, 9), "layer: offsets[0] is -1");
  EXPECT_EQ(error_of({0, 5, 4}, 9), "layer: offsets[2] is 4, below the one before it");
  EXPECT_EQ(error_of({0, 10}, 9), "layer: offsets ends at 10, there are 9 tokens");
}

// Every token is in a gap or in a document, whatever lies before, between and behind.
TEST(Documents, GapsAreWhatTheDocumentsLeave) {
  const std::vector<TokenRange> documents = {{2, 3}, {5, 0}, {5, 1}, {8, 2}, {12, 0}};
  std::vector<int> covered(12, 0);
  for (const TokenRange& d : documents)
    for (std::int64_t t = d.begin; t < d.begin + d.count; ++t)
      ++covered[static_cast<std::size_t>(t)];
  for_gaps(
      documents, covered.size(), [](const TokenRange& d) { return d; },
      [&](std::size_t begin, std::size_t end) {
        for (std::size_t t = begin; t < end; ++t) ++covered[t];
      });
  EXPECT_EQ(covered, std::vector<int>(12, 1));
}

TEST(Documents, ClearsTheTokensOfAStridedView) {
  std::vector<std::uint16_t> data(6 * 20, 7);
  clear_tokens({data.data() + 1, 20, 8}, {2, 5, 2}, 2, 4);
  for (std::size_t i = 0; i < data.size(); ++i) {
    const std::size_t token = i / 20, at = i % 20;
    const bool inside = token >= 2 && token < 4 && ((at >= 1 && at < 6) || (at >= 9 && at < 14));
    EXPECT_EQ(data[i], inside ? 0 : 7) << i;
  }
}

TEST(WorkUnits, LargestFirstAndEqualOnesInOrder) {
  const double work[] = {3, 0, 9, 3};
  const auto units = work_units(4, 2, [&](std::size_t d) -> std::optional<double> {
    if (d == 1) return std::nullopt;
    return work[d];
  });
  std::vector<std::pair<std::size_t, std::size_t>> order;
  for (const WorkUnit& unit : units) order.push_back({unit.document, unit.head});
  const std::vector<std::pair<std::size_t, std::size_t>> want = {{2, 0}, {2, 1}, {0, 0},
                                                                 {0, 1}, {3, 0}, {3, 1}};
  EXPECT_EQ(order, want);
  EXPECT_EQ(count_shared(units, 1, 1, 0), 0u);
  EXPECT_EQ(count_shared(units, 4, 1, 0), 2u);  // 30 in all, 7.5 per thread
  EXPECT_EQ(count_shared(units, 4, 0.25, 0), 6u);
  EXPECT_EQ(count_shared(units, 4, 0.25, 3), 2u);
}

TEST(WorkUnits, EachIsTakenOnce) {
  ThreadPool pool(3);
  std::vector<std::atomic<int>> taken(100);
  dynamic_schedule(
      taken.size(),
      [&](std::size_t count, std::size_t grain, ParallelBody body) {
        pool.parallel_for(count, grain, body);
      },
      [&](std::size_t i) { ++taken[i]; });
  for (const auto& t : taken) EXPECT_EQ(t, 1);
}

}  // namespace
}  // namespace monograph
