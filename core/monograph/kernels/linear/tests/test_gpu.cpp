// The GPU's linear for few rows on the host harness, against fp64.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "monograph/formats/tests/small_weights.h"
#include "monograph/gpu/host/launch.h"
#include "monograph/kernels/dequantize/dequantize.h"
#include "monograph/kernels/linear/gpu.cuh"

namespace monograph::gpu {
namespace {

using host::Grid;
using host::Order;
using host::Range;

enum class Kernel { kSimt, kMma };

template <class F, class T>
void launch_few_rows(Kernel kernel, const FewRowsJob<T>& job, std::span<const Range> memory,
                     Order order) {
  const auto simt = [&]<unsigned kRows>() {
    const Grid grid = {static_cast<unsigned>(linear_simt_blocks(job.weight.rows)), 1, kSimtThreads};
    host::launch(grid, memory, order, [&] { linear_simt_kernel<F, T, kRows>(job); });
  };
  if (kernel == Kernel::kSimt) {
    if (job.rows == 1) return simt.template operator()<1>();
    if (job.rows == 2) return simt.template operator()<2>();
    if (job.rows <= 4) return simt.template operator()<4>();
    return simt.template operator()<8>();
  }
  if constexpr (sizeof(T) == 2) {
    const auto tiles = [&]<unsigned kTiles>() {
      const Grid grid = {static_cast<unsigned>(linear_mma_blocks(job.weight.rows)), 1, kMmaThreads};
      host::launch(grid, memory, order, [&] { linear_mma_kernel<F, T, kTiles>(job); });
    };
    if (job.rows <= 16) return tiles.template operator()<1>();
    if (job.rows <= 32) return tiles.template operator()<2>();
    return tiles.template operator()<4>();
  }
}

template <class T, class... Fs>
void run(FormatList<Fs...>, Kernel kernel, const FewRowsJob<T>& job, std::span<const Range> memory,
         Order order) {
  ((job.weight.format == Fs::kFormat ? launch_few_rows<Fs>(kernel, job, memory, order) : void()),
   ...);
}

struct Options {
  std::size_t rank = 0;
  bool bias = false, gain = false;
  std::size_t shift = 0;  // elements that x and its rows lie off their alignment
};

template <class T>
struct Problem {
  std::vector<T> w, b, bias;  // w dequantised and rounded, as the contract says
  std::vector<Words4> x_words, u_words;
  T *x, *u;
  std::vector<float> gain;
  std::size_t n, k, rank, x_stride;
  std::vector<Range> memory;
  FewRowsJob<T> job = {};

  Problem(const SmallWeight& weight, unsigned rows, const Options& o, unsigned seed)
      : n(weight.view.rows), k(weight.view.cols), rank(o.rank), x_stride(k + o.shift) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto draw = [&] { return from_float<T>(normal(random)); };
    w.resize(n * k);
    dequantize(weight.view, dtype_of<T>, w.data(), serial_for);
    x_words.resize((rows * x_stride + o.shift) * sizeof(T) / 16 + 1);
    u_words.resize(rows * rank * sizeof(T) / 16 + 1);
    x = reinterpret_cast<T*>(x_words.data()) + o.shift;
    u = reinterpret_cast<T*>(u_words.data());
    for (std::size_t i = 0; i < rows * x_stride; ++i) x[i] = draw();
    for (std::size_t i = 0; i < rows * rank; ++i) u[i] = draw();
    for (std::size_t i = 0; i < n * rank; ++i) b.push_back(draw());
    if (o.bias)
      for (std::size_t i = 0; i < n; ++i) bias.push_back(draw());
    if (o.gain)
      for (std::size_t i = 0; i < n; ++i) gain.push_back(normal(random));
    memory = {host::input(weight.values),
              {x, rows * x_stride * sizeof(T), false},
              {u, rows * rank * sizeof(T), false},
              host::input(b),
              host::input(bias),
              host::input(gain)};
    for (const Bytes& bytes : weight.scales) memory.push_back(host::input(bytes));
    job.weight = weight.view;
    job.rows = rows;
    job.x = x;
    job.x_stride = x_stride;
    job.rank = rank;
    job.u = u;
    job.u_stride = rank;
    job.b = b.data();
    job.bias = o.bias ? bias.data() : nullptr;
    job.gain = o.gain ? gain.data() : nullptr;
    job.y_stride = n + 3;
  }

  std::vector<T> run_with(Kernel kernel, unsigned first, unsigned rows, Order order) const {
    std::vector<T> y(rows * (n + 3), T{});
    FewRowsJob<T> part = job;
    part.rows = rows;
    part.x += first * x_stride;
    part.u += first * rank;
    part.y = y.data();
    std::vector<Range> all = memory;
    all.push_back(host::output(y));
    run(PackedFormats{}, kernel, part, all, order);
    return y;
  }

  // |y - exact| <= (K + r + 3) 2^-24 * sum |terms| (fp32, any order), and one rounding to T.
  void check(const std::vector<T>& y, const std::string& name) const {
    const double to_t = sizeof(T) == 4 ? 0x1p-24 : std::is_same_v<T, Bf16> ? 0x1p-8 : 0x1p-11;
    for (std::size_t m = 0; m < job.rows; ++m)
      for (std::size_t c = 0; c < n; ++c) {
        double exact = 0, terms = 0;
        const auto add_term = [&](T left, T right) {
          const double p = static_cast<double>(to_float(left)) * to_float(right);
          exact += p;
          terms += std::fabs(p);
        };
        for (std::size_t i = 0; i < k; ++i) add_term(x[m * x_stride + i], w[c * k + i]);
        for (std::size_t i = 0; i < rank; ++i) add_term(u[m * rank + i], b[c * rank + i]);
        if (!gain.empty()) exact *= gain[c], terms *= std::fabs(gain[c]);
        if (!bias.empty()) {
          exact += to_float(bias[c]);
          terms += std::fabs(to_float(bias[c]));
        }
        const double sums = static_cast<double>(k + rank + 3) * 0x1p-24 * terms;
        const double bound = sums + to_t * (std::fabs(exact) + sums) + 0x1p-25;
        ASSERT_LE(std::fabs(to_float(y[m * (n + 3) + c]) - exact), bound)
            << name << " row " << m << " column " << c;
      }
  }
};

template <class T>
class GpuLinear : public testing::Test {};
using Types = testing::Types<float, Bf16, Fp16>;
TYPED_TEST_SUITE(GpuLinear, Types);

template <class T>
std::vector<Kernel> kernels_of() {
  if (sizeof(T) == 4) return {Kernel::kSimt};
  return {Kernel::kSimt, Kernel::kMma};
}

// Bits are the same for three orders, and each row has those it has alone.
template <class T>
void check_all(const SmallWeight& w, unsigned rows, const Options& o, unsigned seed) {
  const Problem<T> problem(w, rows, o, seed);
  for (const Kernel kernel : kernels_of<T>()) {
    if (kernel == Kernel::kSimt && rows > kSimtRows) continue;
    const std::string name = w.name + (kernel == Kernel::kSimt ? " simt " : " mma ");
    std::vector<T> first;
    for (const Order order : host::kOrders) {
      const std::vector<T> y = problem.run_with(kernel, 0, rows, order);
      if (first.empty()) problem.check(first = y, name);
      ASSERT_EQ(std::memcmp(y.data(), first.data(), y.size() * sizeof(T)), 0) << name;
    }
    const unsigned last = rows - 1;
    const std::vector<T> alone = problem.run_with(kernel, last, 1, Order::kAscending);
    const std::size_t stride = w.view.rows + 3;
    ASSERT_EQ(std::memcmp(alone.data(), &first[last * stride], stride * sizeof(T)), 0) << name;
  }
}

// Of each format: rows that are whole pieces and rows that are not, where they may.
std::vector<SmallWeight> weights() {
  using enum ScaleKind;
  std::vector<SmallWeight> all;
  for (const char* format : {"nf4", "fp4"}) {
    all.push_back(small_weight(format, kFp32, 64, true, {37, 328}, 1));
    all.push_back(small_weight(format, kFp32, 32, false, {9, 77}, 2));
  }
  for (const char* format : {"mxfp4", "mxfp8"})
    all.push_back(small_weight(format, kE8m0, 32, false, {33, 288}, 3));
  for (const char* format : {"nvfp4", "nvfp4-divide"})
    all.push_back(small_weight(format, kE4m3, 16, false, {33, 208}, 4));
  for (const ScaleKind kind : {kFp32, kBf16, kE8m0})
    all.push_back(small_weight("fp8-block", kind, 128, false, {130, 136}, 5));
  all.push_back(small_weight("fp8-block", kFp32, 128, false, {5, 133}, 6));
  return all;
}

TYPED_TEST(GpuLinear, EveryFormatWithinTheBoundOfFp64) {
  unsigned seed = 0;
  for (const SmallWeight& w : weights())
    check_all<TypeParam>(w, 3, {.rank = 16, .bias = true}, ++seed);
}

TYPED_TEST(GpuLinear, EveryNumberOfRows) {
  const SmallWeight w = small_weight("nf4", ScaleKind::kFp32, 64, true, {35, 192}, 7);
  for (const unsigned rows : {1u, 2u, 4u, 5u, 8u, 16u, 17u, 33u, 64u}) {
    if (sizeof(TypeParam) == 4 && rows > kSimtRows) continue;
    check_all<TypeParam>(w, rows, {.rank = rows}, rows);
  }
}

TYPED_TEST(GpuLinear, LowRankBiasAndGain) {
  const SmallWeight w = small_weight("mxfp8", ScaleKind::kE8m0, 32, false, {9, 64}, 8);
  for (const std::size_t rank : {0u, 1u, 8u, 70u})
    for (const bool bias : {false, true})
      for (const bool gain : {false, true})
        check_all<TypeParam>(w, 2, {.rank = rank, .bias = bias, .gain = gain}, 9);
}

TYPED_TEST(GpuLinear, ActivationsAtAnyAddress) {
  const SmallWeight w = small_weight("nf4", ScaleKind::kFp32, 64, false, {9, 136}, 10);
  for (const std::size_t shift : {1u, 4u, 8u}) check_all<TypeParam>(w, 5, {.shift = shift}, 11);
}

TYPED_TEST(GpuLinear, SlicesOfRows) {
  SmallWeight w = small_weight("nf4", ScaleKind::kFp32, 32, true, {21, 40}, 12);
  w.view = slice_rows(w.view, 5, 11);
  check_all<TypeParam>(w, 2, {.rank = 4}, 13);
}

}  // namespace
}  // namespace monograph::gpu
