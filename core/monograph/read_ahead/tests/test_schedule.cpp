// The order of uses, and Schedule against the least that any schedule can read, by a search over
// everything that may be held.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "monograph/read_ahead/schedule.h"

namespace monograph {
namespace {

using Sequence = std::vector<std::size_t>;
using Sizes = std::vector<std::size_t>;

// Forward and backward, `times` over.
Sequence zigzag(std::size_t units, std::size_t times) {
  Sequence uses;
  for (std::size_t t = 0; t < times; ++t) {
    for (std::size_t u = 0; u < units; ++u) uses.push_back(u);
    for (std::size_t u = units; u-- > 0;) uses.push_back(u);
  }
  return uses;
}

Sequence cycle(std::size_t units, std::size_t times) {
  Sequence uses;
  for (std::size_t t = 0; t < times; ++t)
    for (std::size_t u = 0; u < units; ++u) uses.push_back(u);
  return uses;
}

// Bytes that must be read for all of `uses`, whatever is held when: a search over subsets of units.
std::size_t least_read(const Sequence& uses, const Sizes& sizes, std::size_t allowed) {
  const std::size_t subsets = std::size_t{1} << sizes.size();
  const auto bytes = [&](std::size_t set) {
    std::size_t sum = 0;
    for (std::size_t u = 0; u < sizes.size(); ++u) sum += (set >> u & 1) * sizes[u];
    return sum;
  };
  constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();
  std::vector<std::size_t> cost(subsets, kNever);
  cost[0] = 0;
  for (const std::size_t unit : uses) {
    std::vector<std::size_t> after(subsets, kNever);
    for (std::size_t set = 0; set < subsets; ++set) {
      if (cost[set] == kNever) continue;
      const std::size_t read = (set >> unit & 1) != 0 ? 0 : sizes[unit];
      const std::size_t grown = set | std::size_t{1} << unit;
      // Any part of it may be let go, but for what is used.
      for (std::size_t kept = grown;; kept = (kept - 1) & grown) {
        if ((kept >> unit & 1) != 0 && bytes(kept) <= allowed)
          after[kept] = std::min(after[kept], cost[set] + read);
        if (kept == 0) break;
      }
    }
    cost = after;
  }
  return *std::min_element(cost.begin(), cost.end());
}

// Runs a schedule along `uses`. `pace`: pieces that can be read during one use beside what is
// waited for. The bytes read until each use is over.
std::vector<std::size_t> run(const Sequence& uses, const Sizes& sizes, std::size_t allowed,
                             std::size_t pace) {
  std::vector<Piece> pieces;
  for (std::size_t u = 0; u < sizes.size(); ++u)
    for (std::size_t at = 0; at < sizes[u]; ++at) pieces.push_back({u, 1});
  Schedule schedule(pieces, sizes.size(), allowed);
  std::vector<std::size_t> read;
  std::size_t total = 0;
  for (const std::size_t unit : uses) {
    schedule.use(unit);
    std::size_t left = pace;
    for (;;) {
      std::optional<std::size_t> wanted;
      for (std::size_t i = 0; i < pieces.size() && !wanted; ++i)
        if (pieces[i].unit == unit && !schedule.is_complete(i)) wanted = i;
      const Schedule::Action action = schedule.next(wanted);
      if (action.kind == Schedule::Kind::kNothing) break;
      const bool reads = action.kind == Schedule::Kind::kRead;
      if (reads && !schedule.is_complete(action.piece)) {
        if (!wanted && left-- == 0) break;
        ++total;
      }
      schedule.set_held(action.piece, reads ? 1 : 0);
      EXPECT_LE(schedule.held(), allowed);
    }
    for (std::size_t i = 0; i < pieces.size(); ++i)
      EXPECT_TRUE(pieces[i].unit != unit || schedule.is_complete(i));
    read.push_back(total);
  }
  return read;
}

constexpr std::size_t kFast = 1000000;

Sequence next_of(const UseOrder& order, std::size_t count) {
  return {order.upcoming().begin(), order.upcoming().begin() + static_cast<std::ptrdiff_t>(count)};
}

TEST(UseOrder, GuessesUpAndDown) {
  UseOrder order(5);
  EXPECT_EQ(next_of(order, 10), (Sequence{0, 1, 2, 3, 4, 3, 2, 1, 0, 1}));
  for (const std::size_t unit : {0, 1, 2}) order.use(unit);
  EXPECT_EQ(next_of(order, 4), (Sequence{3, 4, 3, 2}));
  order.use(2);
  EXPECT_EQ(next_of(order, 4), (Sequence{3, 4, 3, 2}));
  for (const std::size_t unit : {3, 4, 3}) order.use(unit);
  EXPECT_EQ(next_of(order, 5), (Sequence{2, 1, 0, 1, 2}));
  UseOrder one(1);
  one.use(0);
  EXPECT_EQ(next_of(one, 2), (Sequence{0, 0}));
}

// Layers in segments of two: backward goes up in each, and the same two units follow each other up
// in forward and in backward.
TEST(UseOrder, LearnsSegments) {
  const Sequence step = {0, 1, 2, 3, 4, 5, 4, 5, 4, 2, 3, 2, 0, 1, 0};
  UseOrder order(6);
  for (int times = 0; times < 2; ++times)
    for (const std::size_t unit : step) order.use(unit);
  for (std::size_t at = 0; at + 1 < step.size(); ++at) {
    order.use(step[at]);
    EXPECT_EQ(order.upcoming()[0], step[at + 1]) << at;
  }
}

TEST(UseOrder, ForgetsDisorder) {
  std::mt19937 random(0);
  UseOrder order(50);
  for (int i = 0; i < 40000; ++i) order.use(random() % 50);
  EXPECT_EQ(order.upcoming().size(), 200u);
}

TEST(Schedule, ZigzagReadsTheLeast) {
  const std::vector<Sizes> models = {{1, 1, 1, 1, 1, 1}, {2, 2, 2, 2, 5}, {3, 1, 2, 1, 4}, {1, 1}};
  for (const Sizes& sizes : models) {
    std::size_t all = 0, largest = 0;
    for (const std::size_t size : sizes) all += size, largest = std::max(largest, size);
    for (std::size_t allowed = largest; allowed <= all + 1; ++allowed) {
      for (const std::size_t pace : {std::size_t{0}, std::size_t{1}, kFast}) {
        const std::size_t steps = 5, uses = 2 * sizes.size();
        const std::vector<std::size_t> read =
            run(zigzag(sizes.size(), steps), sizes, allowed, pace);
        for (std::size_t step = 2; step < steps; ++step) {
          const std::size_t bytes = read[(step + 1) * uses - 1] - read[step * uses - 1];
          EXPECT_EQ(bytes, 2 * (all - std::min(all, allowed)))
              << sizes.size() << " units, allowed " << allowed << ", pace " << pace;
        }
        // Nothing that goes by whole units does better.
        const std::size_t least = least_read(zigzag(sizes.size(), steps), sizes, allowed) -
                                  least_read(zigzag(sizes.size(), steps - 1), sizes, allowed);
        EXPECT_GE(least, 2 * (all - std::min(all, allowed)));
        if (sizes == models[0]) EXPECT_EQ(least, 2 * (all - std::min(all, allowed)));
      }
    }
  }
}

// Evaluation: the first pass expects a way back, later ones do not.
TEST(Schedule, CycleReadsTheLeastOnceLearnt) {
  const Sizes sizes(6, 1);
  for (std::size_t allowed = 3; allowed <= 7; ++allowed) {
    const std::size_t passes = 32;
    for (const std::size_t pace : {std::size_t{0}, kFast}) {
      const std::vector<std::size_t> read = run(cycle(6, passes), sizes, allowed, pace);
      const std::size_t ours = read.back() - read[6 * 2 - 1];
      // One unit is read while another is used, so that one place less keeps what it has.
      const std::size_t least =
          least_read(cycle(6, passes), sizes, std::min<std::size_t>(allowed - 1, 6)) -
          least_read(cycle(6, 2), sizes, std::min<std::size_t>(allowed - 1, 6));
      EXPECT_LE(ours, allowed >= 6 ? 0 : least + 1) << allowed << " " << pace;
    }
  }
}

TEST(Schedule, BackToTrainingAfterEvaluation) {
  const Sizes sizes(8, 1);
  Sequence uses = zigzag(8, 3);
  const Sequence evaluation = cycle(8, 3), more = zigzag(8, 3);
  uses.insert(uses.end(), evaluation.begin(), evaluation.end());
  uses.insert(uses.end(), more.begin(), more.end());
  const std::vector<std::size_t> read = run(uses, sizes, 4, kFast);
  const std::size_t last = read.back() - read[read.size() - 1 - 16];
  EXPECT_EQ(last, 2u * (8 - 4));
}

// The way of reading early: while the units at the turn are computed, those farther on come in.
TEST(Schedule, ReadsAheadOfNeed) {
  const Sizes sizes(10, 1);
  const Sequence uses = zigzag(10, 4);
  const std::vector<std::size_t> read = run(uses, sizes, 5, 1);
  // From the second step on no use waits: with one unit read per use, every unit was there. At a
  // pace of 0 the same number is read, all of it waited for.
  for (std::size_t i = 20; i + 1 < read.size(); ++i) EXPECT_LE(read[i + 1] - read[i], 1u) << i;
  EXPECT_EQ(run(uses, sizes, 5, 0).back() - run(uses, sizes, 5, 0)[19], 3u * 10);
}

TEST(Schedule, RowsOfTablesStayUntilTheyAreMany) {
  std::vector<Piece> pieces = {{0, 64, Reading::kScattered}, {0, 16}, {1, 16}};
  Schedule schedule(pieces, 2, 64);
  schedule.use(0);
  EXPECT_EQ(schedule.next({}).piece, 1u);
  schedule.set_held(1, 16);
  schedule.set_held(2, 16);
  schedule.set_held(0, 4);  // within a sixteenth
  EXPECT_EQ(schedule.next({}).kind, Schedule::Kind::kNothing);
  schedule.set_held(0, 40);  // over the whole
  EXPECT_EQ(schedule.next({}).kind, Schedule::Kind::kDrop);
  EXPECT_EQ(schedule.next({}).piece, 0u);
}

TEST(Schedule, ExpertsComeAgainIfTheyWereUsed) {
  Schedule schedule({{0, 1}, {1, 1, Reading::kRouted}, {1, 1, Reading::kRouted}, {2, 1}}, 3, 3);
  const auto settle = [&](std::optional<std::size_t> wanted) {
    for (Schedule::Action action = schedule.next(wanted); action.kind != Schedule::Kind::kNothing;
         action = schedule.next(wanted)) {
      schedule.set_held(action.piece, action.kind == Schedule::Kind::kRead ? 1 : 0);
      if (action.kind == Schedule::Kind::kRead && wanted == action.piece) wanted.reset();
    }
  };
  schedule.use(0);
  settle({});
  EXPECT_FALSE(schedule.is_complete(1) || schedule.is_complete(2));
  schedule.use(1);
  schedule.use_piece(2);
  settle(2);
  EXPECT_TRUE(schedule.is_complete(2));
  schedule.set_held(2, 0);
  schedule.use(2);
  settle({});
  EXPECT_TRUE(schedule.is_complete(2));  // on the way back it is expected
  EXPECT_FALSE(schedule.is_complete(1));
  schedule.use(1);  // and not used this time, nor the next
  schedule.use(0);
  schedule.use(1);
  schedule.set_held(2, 0);
  schedule.use(2);
  settle({});
  EXPECT_FALSE(schedule.is_complete(2));
}

// What the system has taken meanwhile: pieces of the next unit are read again.
TEST(Schedule, LooksAgainAtTheNextUnit) {
  Schedule schedule({{0, 1}, {1, 1}, {2, 1}}, 3, 3);
  for (const std::size_t unit : {0, 1, 2, 1}) {
    schedule.use(unit);
    for (std::size_t i = 0; i < 3; ++i) {
      const Schedule::Action action = schedule.next({});
      if (action.kind == Schedule::Kind::kRead) schedule.set_held(action.piece, 1);
    }
  }
  schedule.use(0);
  const Schedule::Action action = schedule.next({});
  EXPECT_EQ(action.kind, Schedule::Kind::kRead);
  EXPECT_EQ(action.piece, 1u);
}

}  // namespace
}  // namespace monograph
