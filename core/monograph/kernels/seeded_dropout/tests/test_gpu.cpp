// Philox at fixed places, and the GPU's dropout on the host harness. ops/tests/test_philox.cpp
// compares Philox with torch's engine.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "monograph/gpu/host/launch.h"
#include "monograph/kernels/seeded_dropout/gpu.cuh"

namespace monograph::gpu {
namespace {

using host::Order;
using host::Range;

// The words that torch's engine has for these keys and counters.
TEST(Philox, KnownAnswers) {
  const auto answer = [](PhiloxWords counter, std::uint64_t key) {
    const PhiloxWords w = philox(counter, key);
    return std::vector<std::uint32_t>(w.word, w.word + 4);
  };
  using Words = std::vector<std::uint32_t>;
  EXPECT_EQ(answer({{0, 0, 0, 0}}, 0), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(answer({{~0u, ~0u, ~0u, ~0u}}, ~std::uint64_t{0}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(answer({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0x299f31d0a4093822),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, Thresholds) {
  EXPECT_EQ(keep_below(0.0), std::uint64_t{1} << 32);
  EXPECT_EQ(keep_below(0.5), std::uint64_t{1} << 31);
  EXPECT_EQ(keep_below(0.25), std::uint64_t{3} << 30);
}

template <class T>
class GpuDropout : public testing::Test {};
using Types = testing::Types<float, Bf16, Fp16>;
TYPED_TEST_SUITE(GpuDropout, Types);

template <class T>
std::vector<T> run(const std::vector<T>& x, std::int64_t seed, std::uint64_t stream, double p,
                   Order order) {
  const std::vector<std::int64_t> seeds = {seed};
  std::vector<T> out(x.size());
  const std::vector<Range> memory = {host::input(x), host::input(seeds), host::output(out)};
  const DropoutJob<T> job = {x.data(),
                             out.data(),
                             x.size(),
                             seeds.data(),
                             stream,
                             keep_below(p),
                             static_cast<float>(1 - p)};
  host::launch({static_cast<unsigned>(dropout_blocks(x.size())), 1, kDropoutThreads}, memory, order,
               [&] { seeded_dropout_kernel<T>(job); });
  return out;
}

TYPED_TEST(GpuDropout, FollowsFromSeedStreamAndPosition) {
  for (const std::size_t n : {1u, 3u, 4u, 511u, 1030u})
    for (const double p : {0.0, 0.1, 0.5, 0.9}) {
      std::vector<TypeParam> x(n);
      for (std::size_t i = 0; i < n; ++i)
        x[i] = from_float<TypeParam>(static_cast<float>(i % 97) - 48.5f);
      const std::int64_t seed = -12345678901234567;
      const auto first = run(x, seed, 3, p, Order::kAscending);
      for (const Order order : host::kOrders)
        EXPECT_EQ(
            std::memcmp(run(x, seed, 3, p, order).data(), first.data(), n * sizeof(TypeParam)), 0);
      for (std::size_t i = 0; i < n; ++i) {
        const std::uint64_t key =
            static_cast<std::uint64_t>(seed) * 0x9E3779B97F4A7C15 + 3 * 0xD1B54A32D192ED03;
        const PhiloxWords words = philox({{static_cast<std::uint32_t>(i / 4), 0, 0, 0}}, key);
        const bool keep = words.word[i % 4] < (1 - p) * 0x1p32;
        const float value = keep ? to_float(x[i]) : to_float(x[i]) * 0.0f;
        const TypeParam want = from_float<TypeParam>(value / static_cast<float>(1 - p));
        ASSERT_EQ(std::memcmp(&first[i], &want, sizeof want), 0) << i;
      }
    }
}

TYPED_TEST(GpuDropout, HasTheRightShareOfZeros) {
  const std::vector<TypeParam> x(1 << 15, from_float<TypeParam>(1.0f));
  std::vector<std::vector<TypeParam>> masks;
  for (const auto& [seed, stream] : {std::pair<int, unsigned>{1, 0}, {1, 1}, {2, 0}}) {
    masks.push_back(run(x, seed, stream, 0.2, Order::kAscending));
    double zeros = 0;
    for (const TypeParam v : masks.back()) zeros += to_float(v) == 0.0f;
    // Five standard deviations of a binomial.
    EXPECT_NEAR(zeros / (1 << 15), 0.2, 5 * std::sqrt(0.2 * 0.8 / (1 << 15)));
  }
  for (std::size_t i = 1; i < masks.size(); ++i)
    EXPECT_NE(std::memcmp(masks[0].data(), masks[i].data(), x.size() * sizeof(TypeParam)), 0);
}

TYPED_TEST(GpuDropout, DroppedNanAndInfinityStayNan) {
  const std::vector<TypeParam> x(512, from_float<TypeParam>(INFINITY));
  bool dropped = false;
  for (const TypeParam v : run(x, 5, 0, 0.5, Order::kAscending)) {
    dropped = dropped || std::isnan(to_float(v));
    EXPECT_TRUE(std::isnan(to_float(v)) || to_float(v) == INFINITY);
  }
  EXPECT_TRUE(dropped);
}

}  // namespace
}  // namespace monograph::gpu
