// The probes of a card's self-test on the host harness: each gives what its instruction is defined
// to give, so that on a card another result is the card's.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "monograph/gpu/host/launch.h"
#include "monograph/gpu/probes.cuh"

namespace monograph::gpu {
namespace {

using host::kOrders;
using host::Order;

constexpr host::Grid kWarp = {1, 1, kProbeThreads};

template <class T>
void check_mma() {
  // a[i][k] b[k][j] of small whole numbers: sums are exact in any order.
  std::vector<T> a(256), b(128);
  std::vector<float> c(128), d(128);
  for (int i = 0; i < 256; ++i) a[i] = from_float<T>(static_cast<float>(i * 7 % 13 - 6));
  for (int i = 0; i < 128; ++i) {
    b[i] = from_float<T>(static_cast<float>(i * 5 % 11 - 5));
    c[i] = static_cast<float>(i);
  }
  const host::Range memory[] = {host::input(a), host::input(b), host::input(c), host::output(d)};
  for (const Order order : kOrders) {
    host::launch(kWarp, memory, order,
                 [&] { probe_mma_kernel<T>(a.data(), b.data(), c.data(), d.data()); });
    for (int row = 0; row < 16; ++row)
      for (int col = 0; col < 8; ++col) {
        float sum = c[row * 8 + col];
        for (int k = 0; k < 16; ++k) sum += to_float(a[row * 16 + k]) * to_float(b[k * 8 + col]);
        ASSERT_EQ(d[row * 8 + col], sum) << row << ", " << col;
      }
  }
}

TEST(GpuProbes, MmaAdds16By16Times16By8) {
  check_mma<Bf16>();
  check_mma<Fp16>();
}

std::vector<float> numbers() {
  std::vector<float> all = {0.0f, -0.0f, 1.0f, -3.5f, 65504.0f, 1e-8f, 3e38f, INFINITY};
  for (int i = 0; i < 92; ++i)
    all.push_back(std::ldexp(1.0f + 0.37f * static_cast<float>(i), i - 50));
  return all;
}

template <class T>
void check_rounding() {
  const std::vector<float> x = numbers();
  std::vector<std::uint32_t> packed(x.size() / 2);
  std::vector<T> narrow(x.size());
  std::vector<float> wide(x.size());
  const host::Grid grid = {static_cast<unsigned>(x.size() / kProbeThreads + 1), 1, kProbeThreads};
  const host::Range pack[] = {host::input(x), host::output(packed)};
  host::launch(grid, pack, Order::kScattered, [&] {
    probe_pack_kernel<T>(x.data(), x.size(), reinterpret_cast<T*>(packed.data()));
  });
  std::memcpy(narrow.data(), packed.data(), packed.size() * 4);
  const host::Range widened[] = {host::input(narrow), host::output(wide)};
  host::launch(grid, widened, Order::kScattered,
               [&] { probe_widen_kernel<T>(narrow.data(), narrow.size(), wide.data()); });
  for (std::size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(narrow[i].bits, from_float<T>(x[i]).bits) << x[i];
    ASSERT_EQ(wide[i], to_float(narrow[i])) << x[i];
  }
}

TEST(GpuProbes, PackRoundsToNearestEvenAndWidenIsExact) {
  check_rounding<Bf16>();
  check_rounding<Fp16>();
}

template <ProbeArithmetic kOperation, class Want>
void check_arithmetic(Want want) {
  const std::vector<float> x = numbers();
  std::vector<float> y(x.rbegin(), x.rend()), z(x.size(), 0.75f), out(x.size());
  const host::Grid grid = {static_cast<unsigned>(x.size() / kProbeThreads + 1), 1, kProbeThreads};
  const host::Range memory[] = {host::input(x), host::input(y), host::input(z), host::output(out)};
  host::launch(grid, memory, Order::kScattered, [&] {
    probe_arithmetic_kernel<kOperation>(x.data(), y.data(), z.data(), x.size(), out.data());
  });
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float wanted = want(x[i], y[i], z[i]);
    ASSERT_TRUE(out[i] == wanted || (std::isnan(out[i]) && std::isnan(wanted)))
        << x[i] << " " << y[i];
  }
}

TEST(GpuProbes, ArithmeticIsRoundedOnce) {
  check_arithmetic<ProbeArithmetic::kMul>([](float a, float b, float) { return a * b; });
  check_arithmetic<ProbeArithmetic::kAdd>([](float a, float b, float) { return a + b; });
  check_arithmetic<ProbeArithmetic::kDiv>([](float a, float b, float) { return a / b; });
  check_arithmetic<ProbeArithmetic::kFma>(
      [](float a, float b, float c) { return std::fma(a, b, c); });
}

TEST(GpuProbes, CopiesArriveForOtherThreadsAndAreZeroBehindTheEnd) {
  std::vector<Words4> in(50), out(50);
  for (std::size_t i = 0; i < in.size(); ++i)
    in[i] = {{static_cast<std::uint32_t>(i) + 1, 2, 3, 4}};
  const host::Range memory[] = {host::input(in), host::output(out)};
  for (const Order order : kOrders)
    for (const std::size_t used : {0u, 16u, 512u, 800u}) {
      host::launch({2, 1, kProbeThreads}, memory, order, [&] {
        probe_copy_async_kernel(reinterpret_cast<const std::uint8_t*>(in.data()), 800, used,
                                reinterpret_cast<std::uint8_t*>(out.data()));
      });
      for (std::size_t i = 0; i < in.size(); ++i) {
        const Words4 zeros = {{0, 0, 0, 0}};
        const Words4& wanted = 16 * i < used ? in[i] : zeros;
        ASSERT_EQ(std::memcmp(&out[i], &wanted, 16), 0) << i << " of " << used;
      }
    }
}

TEST(GpuProbes, ShuffleXorTakesFromTheOtherLane) {
  std::vector<float> x(32), out(32);
  for (int i = 0; i < 32; ++i) x[i] = static_cast<float>(i) + 0.5f;
  const host::Range memory[] = {host::input(x), host::output(out)};
  for (const unsigned mask : {1u, 2u, 4u, 8u, 16u, 31u}) {
    host::launch(kWarp, memory, Order::kDescending,
                 [&] { probe_shuffle_xor_kernel(x.data(), mask, out.data()); });
    for (unsigned i = 0; i < 32; ++i) ASSERT_EQ(out[i], x[i ^ mask]);
  }
}

}  // namespace
}  // namespace monograph::gpu
