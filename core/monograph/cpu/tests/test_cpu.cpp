// ISA detection and the cap; the thread pool.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "monograph/base/error.h"
#include "monograph/cpu/isa.h"
#include "monograph/cpu/parallel.h"
#include "monograph/kernels/dequantize/dequantize.h"
#include "monograph/kernels/quantize/quantize.h"

namespace monograph {
namespace {

TEST(Isa, NamesRoundTrip) {
  for (int i = 0; i < kIsaCount; ++i) {
    const Isa isa = static_cast<Isa>(i);
    EXPECT_EQ(isa_named(name_of(isa)), isa);
  }
  EXPECT_EQ(isa_named("sse2"), std::nullopt);
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

// The proof that the environment's cap reaches the choice: the function picked is a row of that
// level or below, and the best such row.
TEST(Isa, TheEnvironmentCapHoldsForWhatIsPicked) {
  const char* wanted = std::getenv("MONOGRAPH_ISA");
  const Isa limit = wanted == nullptr ? detected_isa() : capped_isa(detected_isa(), wanted);
  ASSERT_EQ(best_isa(), limit);
  for (const FormatInfo& info : formats()) {
    const auto& variants = dequantize_variants();
    const auto chosen = std::find_if(variants.begin(), variants.end(), [&](const auto& v) {
      return v.run == pick(variants, info.kernels) && v.format == info.kernels;
    });
    ASSERT_NE(chosen, variants.end());
    EXPECT_LE(chosen->isa, limit);
    for (const auto& v : variants)
      if (v.format == info.kernels && v.isa <= limit) EXPECT_LE(v.isa, chosen->isa);
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

}  // namespace
}  // namespace monograph
