// The primitives on the host against their definition.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "monograph/gpu/decode.h"
#include "monograph/gpu/host/launch.h"
#include "monograph/gpu/prims.h"

namespace monograph::gpu {
namespace {

using host::Grid;
using host::Order;
using host::Range;

TEST(GpuPrims, EachThreadOfEachBlockRunsOnceInEveryOrder) {
  for (const Grid grid : {Grid{1, 1, 32}, Grid{3, 2, 96}, Grid{7, 1, 1024}, Grid{0, 1, 32}})
    for (const Order order : host::kOrders) {
      std::vector<std::uint32_t> seen(grid.x * grid.y * grid.threads);
      const std::vector<Range> memory = {host::output(seen)};
      host::launch(grid, memory, order, [&] {
        const unsigned block = block_index_y() * grid.x + block_index_x();
        std::uint32_t* at = seen.data() + block * grid.threads + thread_index();
        write(at, read(at) + 1);
      });
      for (const std::uint32_t count : seen) ASSERT_EQ(count, 1u);
    }
  EXPECT_THROW(host::launch(Grid{1, 1, 33}, {}, Order::kAscending, [] {}), std::invalid_argument);
}

TEST(GpuPrims, OrdersDiffer) {
  std::vector<std::vector<unsigned>> orders;
  for (const Order order : host::kOrders) {
    std::vector<unsigned> came;
    host::launch(Grid{1, 1, 64}, {}, order, [&] { came.push_back(thread_index()); });
    for (const auto& other : orders) EXPECT_NE(came, other);
    orders.push_back(came);
  }
}

TEST(GpuPrims, ShuffleExchangesLanes) {
  for (const unsigned mask : {1u, 2u, 4u, 8u, 16u, 31u})
    for (const Order order : host::kOrders) {
      std::vector<std::uint32_t> out(64);
      const std::vector<Range> memory = {host::output(out)};
      host::launch(Grid{1, 1, 64}, memory, order, [&] {
        write(&out[thread_index()], shuffle_xor<std::uint32_t>(thread_index(), mask));
      });
      for (unsigned i = 0; i < 64; ++i) ASSERT_EQ(out[i], i ^ mask);
    }
}

TEST(GpuPrims, AtomicsKeepTheExtremes) {
  for (const Order order : host::kOrders) {
    std::vector<std::uint64_t> least(1, ~std::uint64_t{0});
    std::vector<std::uint32_t> most(1, 0);
    const std::vector<Range> memory = {host::output(least), host::output(most)};
    host::launch(Grid{2, 1, 64}, memory, order, [&] {
      const unsigned id = 64 * block_index_x() + thread_index();
      atomic_min(least.data(), 5000 + (id * 37 + 11) % 128);
      atomic_max(most.data(), (id * 37 + 11) % 128);
    });
    EXPECT_EQ(least[0], 5000u);
    EXPECT_EQ(most[0], 127u);
  }
}

struct alignas(16) TwoStages {
  std::uint32_t words[2][32 * 4];
};

TEST(GpuPrims, GroupsOfCopiesArriveInTurnAndZerosReadNothing) {
  std::vector<Words4> in(64);
  for (unsigned i = 0; i < 64; ++i) in[i] = {{i, i + 1, i + 2, i + 3}};
  std::vector<std::uint32_t> out(64);
  const std::vector<Range> memory = {host::input(in), host::output(out)};
  host::launch(Grid{1, 1, 32}, memory, Order::kScattered, [&] {
    TwoStages& shared = shared_memory<TwoStages>();
    const unsigned i = thread_index();
    copy_async(&shared.words[0][4 * i], &in[i], /*zeros=*/false);
    close_group();
    copy_async(&shared.words[1][4 * i], nullptr, /*zeros=*/true);
    close_group();
    wait_for_groups<1>();
    sync_threads();
    write(&out[i], read(&shared.words[0][4 * (31 - i) + 1]));
    wait_for_groups<0>();
    sync_threads();
    write(&out[32 + i], read(&shared.words[1][4 * (31 - i)]));
  });
  for (unsigned i = 0; i < 32; ++i) {
    ASSERT_EQ(out[i], 31 - i + 1);
    ASSERT_EQ(out[32 + i], 0u);
  }
}

// a [16, 16] and b [16, 8] to d [16, 8], by one warp with the fragments of the instruction.
template <class T>
std::vector<float> product(const std::vector<float>& a, const std::vector<float>& b, Order order) {
  std::vector<float> d(16 * 8);
  const std::vector<Range> memory = {host::input(a), host::input(b), host::output(d)};
  host::launch(Grid{1, 1, 32}, memory, order, [&] {
    const unsigned g = thread_index() / 4, t = thread_index() % 4;
    const auto at = [&](const std::vector<float>& m, unsigned i) { return read(m.data() + i); };
    std::uint32_t left[4], right[2];
    for (unsigned p = 0; p < 4; ++p) {
      const unsigned row = g + p % 2 * 8, col = 2 * t + p / 2 * 8;
      left[p] = pack_two<T>(at(a, 16 * row + col), at(a, 16 * row + col + 1));
    }
    for (unsigned p = 0; p < 2; ++p) {
      const unsigned k = 2 * t + 8 * p;
      right[p] = pack_two<T>(at(b, 8 * k + g), at(b, 8 * (k + 1) + g));
    }
    float sums[4] = {};
    mma<T>(sums, left, right);
    for (unsigned p = 0; p < 4; ++p) write(&d[8 * (g + p / 2 * 8) + 2 * t + p % 2], sums[p]);
  });
  return d;
}

template <class T>
class GpuMma : public testing::Test {};
using HalfTypes = testing::Types<Bf16, Fp16>;
TYPED_TEST_SUITE(GpuMma, HalfTypes);

TYPED_TEST(GpuMma, OneHotOperandsFindTheirPlace) {
  for (unsigned row = 0; row < 16; ++row)
    for (unsigned k = 0; k < 16; ++k) {
      std::vector<float> a(16 * 16), b(16 * 8);
      a[16 * row + k] = 1;
      for (unsigned i = 0; i < b.size(); ++i) b[i] = static_cast<float>(i + 1);
      const std::vector<float> d = product<TypeParam>(a, b, Order::kDescending);
      for (unsigned i = 0; i < 16; ++i)
        for (unsigned n = 0; n < 8; ++n)
          ASSERT_EQ(d[8 * i + n], i == row ? b[8 * k + n] : 0.0f) << row << " " << k;
    }
}

TYPED_TEST(GpuMma, SmallIntegersAreExactInEveryOrder) {
  std::mt19937 random(1);
  std::vector<float> a(16 * 16), b(16 * 8);
  for (float& x : a) x = static_cast<float>(random() % 15) - 7;
  for (float& x : b) x = static_cast<float>(random() % 15) - 7;
  for (const Order order : host::kOrders) {
    const std::vector<float> d = product<TypeParam>(a, b, order);
    for (unsigned i = 0; i < 16; ++i)
      for (unsigned n = 0; n < 8; ++n) {
        double sum = 0;
        for (unsigned k = 0; k < 16; ++k)
          sum += static_cast<double>(a[16 * i + k]) * static_cast<double>(b[8 * k + n]);
        ASSERT_EQ(static_cast<double>(d[8 * i + n]), sum);
      }
  }
}

TEST(GpuDecode, EveryE4m3Code) {
  for (unsigned code = 0; code < 256; ++code)
    EXPECT_EQ(as_bits(e4m3_value(code)), as_bits(E4m3::decode(code))) << code;
}

TEST(GpuDecode, NumbersAtAnyAddress) {
  std::vector<std::uint8_t> bytes = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  for (unsigned i = 0; i + 4 <= bytes.size(); ++i) {
    std::uint32_t want;
    std::memcpy(&want, bytes.data() + i, 4);
    EXPECT_EQ(read_u32(bytes.data() + i), want);
    EXPECT_EQ(read_u16(bytes.data() + i), want & 0xffff);
  }
}

TEST(GpuDecode, NanOfTheCpu) {
  const float inf = __builtin_inff();
  EXPECT_EQ(as_bits(mul_as_cpu(0.0f, inf)), 0xffc00000u);
  EXPECT_EQ(as_bits(add_as_cpu(inf, -inf)), 0xffc00000u);
  EXPECT_EQ(as_bits(div_as_cpu(0.0f, 0.0f)), 0xffc00000u);
  EXPECT_EQ(as_bits(mul_as_cpu(2.0f, as_float(0xff812345u))), 0xffc12345u);
  EXPECT_EQ(as_bits(mul_as_cpu(as_float(0x7f800001u), inf)), 0x7fc00001u);
  EXPECT_EQ(as_bits(mul_as_cpu(3.0f, 0x1p-149f)), as_bits(0x1.8p-148f));
}

}  // namespace
}  // namespace monograph::gpu
