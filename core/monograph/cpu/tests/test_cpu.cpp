// ISA detection and the cap; the thread pool.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "monograph/base/error.h"
#include "monograph/cpu/isa.h"
#include "monograph/cpu/parallel.h"
#include "monograph/cpu/tags.h"

namespace monograph {
namespace {

TEST(Isa, NamesRoundTrip) {
  for (const IsaLevel& level : isa_levels()) {
    EXPECT_EQ(isa_named(level.name), level.isa);
    EXPECT_STREQ(name_of(level.isa), level.name);
  }
  EXPECT_EQ(isa_named("sse2"), std::nullopt);
}

// system_info hands the numbers to Python, whose ISA_NAMES has the same.
TEST(Isa, TheNumbersStay) {
  const char* names[] = {"scalar", "avx2", "avx512", "avx512_bf16", "amx"};
  for (int i = 0; i < 5; ++i) EXPECT_STREQ(name_of(static_cast<Isa>(i)), names[i]);
  EXPECT_STREQ(name_of(static_cast<Isa>(32)), "neon");
}

TEST(Isa, EachArchitectureHasAnOrderOfItsOwn) {
  const std::span<const IsaLevel> levels = isa_levels();
  EXPECT_EQ(levels[0].isa, Isa::kScalar);
  for (std::size_t i = 1; i + 1 < levels.size(); ++i)
    if (same_architecture(levels[i].isa, levels[i + 1].isa))
      EXPECT_LT(levels[i].isa, levels[i + 1].isa);
  EXPECT_FALSE(same_architecture(Isa::kNeon, Isa::kAvx2));
  EXPECT_TRUE(same_architecture(Isa::kNeon, Isa::kScalar));
  EXPECT_EQ(capped_isa(Isa::kNeon, "neon"), Isa::kNeon);
  EXPECT_EQ(capped_isa(Isa::kNeon, "scalar"), Isa::kScalar);
  EXPECT_THROW(capped_isa(Isa::kNeon, "amx"), Error);
  EXPECT_THROW(capped_isa(Isa::kAmx, "neon"), Error);
  EXPECT_FALSE(best_first({Isa::kNeon, Isa::kAmx, Isa::kScalar}));
  EXPECT_TRUE(best_first({Isa::kNeon, Isa::kScalar}));
  EXPECT_TRUE(best_first({Isa::kAmx, Isa::kAvx2, Isa::kScalar}));
  EXPECT_FALSE(best_first({Isa::kAvx2, Isa::kAvx512}));
}

TEST(Isa, TheCapLowersAndNeverRaises) {
  EXPECT_EQ(capped_isa(Isa::kAmx, nullptr), Isa::kAmx);
  EXPECT_EQ(capped_isa(Isa::kAmx, ""), Isa::kAmx);
  EXPECT_EQ(capped_isa(Isa::kAmx, "avx2"), Isa::kAvx2);
  EXPECT_EQ(capped_isa(Isa::kAvx2, "amx"), Isa::kAvx2);
  EXPECT_EQ(capped_isa(Isa::kScalar, "avx512_bf16"), Isa::kScalar);
}

TEST(Isa, AnUnknownNameIsAnErrorThatListsTheKnownOnes) {
  try {
    capped_isa(Isa::kAvx2, "sse2");
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("'sse2'"), std::string::npos);
    EXPECT_NE(std::string(e.what()).find("avx512_bf16"), std::string::npos);
  }
}

TEST(ParallelFor, CoversEveryUnitOnce) {
  for (const int threads : {1, 2, 4}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (const std::size_t count : {0, 1, 2, 3, 7, 64, 1001}) {
      for (const std::size_t grain : {0, 1, 5, 2000}) {
        std::vector<std::atomic<int>> hits(count);
        pool.parallel_for(count, grain, [&](std::size_t begin, std::size_t end) {
          for (std::size_t i = begin; i < end; ++i) ++hits[i];
        });
        for (const auto& h : hits) EXPECT_EQ(h, 1);
      }
    }
  }
}

TEST(ParallelFor, AnExceptionReachesTheCallerAndThePoolLives) {
  ThreadPool pool(3);
  const auto failing = [](std::size_t begin, std::size_t) {
    if (begin == 0) throw std::runtime_error("first range");
  };
  EXPECT_THROW(pool.parallel_for(9, 1, failing), std::runtime_error);
  std::atomic<std::size_t> sum = 0;
  pool.parallel_for(9, 1, [&](std::size_t begin, std::size_t end) { sum += end - begin; });
  EXPECT_EQ(sum, 9u);
}

// Calls that follow at once find the threads awake, those after a rest asleep; more threads than
// cores sleep always.
TEST(ParallelFor, ManyShortCallsAndCallsAfterARest) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  for (const int threads : {2, 3, cores, 2 * cores + 1}) {
    ThreadPool pool(threads);
    std::vector<std::size_t> parts(64);
    for (std::size_t call = 0; call < 3000; ++call) {
      pool.parallel_for(parts.size(), 1, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) parts[i] += call + i;
      });
      if (call % 1000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    for (std::size_t i = 0; i < parts.size(); ++i)
      EXPECT_EQ(parts[i], 3000 * 2999 / 2 + 3000 * i) << threads << " threads";
  }
}

TEST(ParallelFor, OneRangeStaysOnTheCaller) {
  ThreadPool pool(2);
  const std::thread::id caller = std::this_thread::get_id();
  std::thread::id other;
  pool.parallel_for(3, 2, [&](std::size_t, std::size_t) { other = std::this_thread::get_id(); });
  EXPECT_EQ(other, caller);
}

}  // namespace
}  // namespace monograph
