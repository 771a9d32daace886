// The GPU's quantize on the host harness: the bytes of the CPU's kernels.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "monograph/formats/dynamic_map.h"
#include "monograph/gpu/host/launch.h"
#include "monograph/kernels/quantize/gpu_scales.cuh"

namespace monograph::gpu {
namespace {

using host::Grid;
using host::Order;
using host::Range;

struct Packed {
  std::vector<std::uint8_t> values, scales;
  std::size_t bad = kAllFinite;
  bool operator==(const Packed&) const = default;
};

struct Case {
  FormatInfo info;
  std::size_t block;
  ScaleKind kind;
  ScaleRule rule;
};

std::vector<Case> every_case() {
  std::vector<Case> cases;
  for (const FormatInfo& info : formats()) {
    if (info.shape == BlockShape::kGroup) continue;  // no kernel
    for (const ScaleKind kind : info.kinds)
      for (const ScaleRule rule : info.rules) {
        cases.push_back({info, info.smallest_block, kind, rule});
        if (info.shape == BlockShape::kFlat) cases.push_back({info, 128, kind, rule});
      }
  }
  return cases;
}

template <class T>
QuantizeJob job_for(const Case& c, const std::vector<T>& in, std::size_t rows, std::size_t cols,
                    const std::vector<TensorScales>& tensors, NonFinite nonfinite, Packed& out) {
  QuantizeJob job = {};
  job.format = c.info.kernels;
  job.dtype = dtype_of<T>;
  job.input = in.data();
  job.elements = in.size();
  job.block = c.block;
  job.nonfinite = nonfinite;
  job.rule = c.rule;
  job.kind = c.kind;
  job.shape = c.info.shape;
  job.matrix_rows = rows;
  job.cols = cols;
  out.values.assign(packed_bytes(c.info, job.elements), 0xa5);
  out.scales.assign(job.blocks() * size_bytes(c.kind), 0xa5);
  job.values = out.values.data();
  job.scales = out.scales.data();
  if (c.info.tensor_scale != TensorScale::kNone) {
    job.tensors = tensors.data();
    job.blocks_per_tensor = rows * cols / c.block;
  }
  return job;
}

template <class T, class... Fs>
std::uint64_t launch_quantize(FormatList<Fs...>, const QuantizeJob& job, std::vector<Range> memory,
                              Order order) {
  std::vector<std::uint64_t> bad(1, ~std::uint64_t{0});
  memory.push_back(host::output(bad));
  const unsigned blocks = static_cast<unsigned>(quantize_grid(job));
  const auto launch = [&]<class F>() {
    if constexpr (F::kShape == BlockShape::kFlat)
      host::launch({blocks, 1, kQuantizeThreads}, memory, order,
                   [&] { quantize_absmax_kernel<F, T>(job, bad.data()); });
    else if constexpr (F::kShape == BlockShape::kRow)
      host::launch({blocks, 1, kQuantizeThreads}, memory, order,
                   [&] { quantize_rows_kernel<F, T>(job, bad.data()); });
    else
      host::launch({blocks, 1, kQuantizeSquareThreads}, memory, order,
                   [&] { quantize_squares_kernel<F, T>(job, bad.data()); });
  };
  ((job.format == Fs::kFormat ? launch.template operator()<Fs>() : void()), ...);
  return bad[0];
}

// The scales of the matrices, on the device, and as the CPU chooses them.
template <class T>
std::vector<TensorScales> tensor_scales(const Case& c, const std::vector<T>& in,
                                        std::size_t matrix) {
  const std::size_t count = in.size() / matrix;
  std::vector<TensorScales> found(count), want;
  std::vector<std::uint32_t> largest(count);
  const std::vector<Range> memory = {host::input(in), host::output(largest), host::output(found)};
  host::launch({3, static_cast<unsigned>(count), kQuantizeThreads}, memory, Order::kDescending,
               [&] { largest_magnitude_kernel<T>(in.data(), matrix, 3, largest.data()); });
  host::launch({1, 1, kQuantizeThreads}, memory, Order::kAscending,
               [&] { nvfp4_tensor_scales_kernel<>(c.rule, largest.data(), count, found.data()); });
  for (std::size_t i = 0; i < count; ++i)
    want.push_back(choose_tensor_scales(c.info.kernels, c.rule, dtype_of<T>, in.data() + i * matrix,
                                        matrix, serial_for));
  EXPECT_EQ(std::memcmp(found.data(), want.data(), count * sizeof(TensorScales)), 0)
      << c.info.name << " " << name_of(c.rule);
  return want;
}

template <class T>
void check(const Case& c, const std::vector<T>& in, std::size_t rows, std::size_t cols,
           NonFinite nonfinite, std::span<const Order> orders) {
  SCOPED_TRACE(c.info.name);
  SCOPED_TRACE(name_of(c.rule));
  std::vector<TensorScales> tensors;
  if (c.info.tensor_scale != TensorScale::kNone) tensors = tensor_scales(c, in, rows * cols);
  Packed want;
  const QuantizeJob cpu = job_for(c, in, rows, cols, tensors, nonfinite, want);
  want.bad = quantize(cpu, serial_for).value_or(kAllFinite);
  for (const Order order : orders) {
    Packed got;
    const QuantizeJob job = job_for(c, in, rows, cols, tensors, nonfinite, got);
    const std::vector<Range> memory = {host::input(in), host::input(tensors),
                                       host::output(got.values), host::output(got.scales)};
    got.bad = launch_quantize<T>(PackedFormats{}, job, memory, order);
    ASSERT_EQ(got.bad, want.bad);
    if (want.bad != kAllFinite) continue;
    ASSERT_EQ(got.scales, want.scales) << name_of(c.kind);
    ASSERT_EQ(got.values, want.values) << name_of(c.kind);
  }
}

constexpr Order kOne[] = {Order::kScattered};

// Magnitudes over the whole range and many ties: small integers times powers of two; zeros, blocks
// so small that a reciprocal overflows.
template <class T>
std::vector<T> hard_input(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<T> in(n);
  const int range = dtype_of<T> == DType::kFloat16 ? 22 : 250;
  for (std::size_t i = 0; i < n; ++i) {
    const int exponent = static_cast<int>(i / 64 * 37 % 251) % range - range / 2;
    const float tie = std::ldexp(static_cast<float>(random() % 256), exponent - 5);
    const float smooth = std::ldexp(static_cast<float>(random() % 65536) / 4096, exponent - 3);
    const float x = random() % 3 == 0 ? smooth : tie;
    in[i] = from_float<T>(random() % 2 == 0 ? -x : x);
    if (i / 64 % 11 == 10) in[i] = from_float<T>(random() % 2 == 0 ? 0.0f : -0.0f);
    if (i / 64 % 11 == 9) in[i] = from_float<T>(std::ldexp(x, -140));
  }
  return in;
}

template <class T>
class GpuQuantize : public testing::Test {};
using InputTypes = testing::Types<float, Bf16, Fp16>;
TYPED_TEST_SUITE(GpuQuantize, InputTypes);

TYPED_TEST(GpuQuantize, BytesOfTheCpuUnderEveryRule) {
  for (const Case& c : every_case()) {
    check(c, hard_input<TypeParam>(12 * 352, 1), 12, 352, NonFinite::kError, host::kOrders);
    check(c, hard_input<TypeParam>(3 * 40 * 160, 2), 40, 160, NonFinite::kError, kOne);
  }
}

TYPED_TEST(GpuQuantize, LastBlocksOfEverySize) {
  for (const Case& c : every_case()) {
    if (c.info.shape != BlockShape::kFlat) continue;
    for (std::size_t n = 1; n <= 2 * c.block + 3; n += n < 40 ? 1 : 13)
      check(c, hard_input<TypeParam>(n, 3), 1, n, NonFinite::kError, kOne);
  }
}

TYPED_TEST(GpuQuantize, PartialSquares) {
  for (const Case& c : every_case()) {
    if (c.info.shape != BlockShape::kSquare) continue;
    for (const auto& [rows, cols] :
         {std::pair<std::size_t, std::size_t>{1, 1}, {130, 129}, {5, 300}})
      check(c, hard_input<TypeParam>(2 * rows * cols, 4), rows, cols, NonFinite::kError, kOne);
  }
}

TYPED_TEST(GpuQuantize, NonFiniteIsNamedOrSaturated) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const Case& c : every_case()) {
    std::vector<TypeParam> in =
        hard_input<TypeParam>(48 * 160 - (c.info.shape == BlockShape::kFlat), 5);
    const std::size_t rows = c.info.shape == BlockShape::kFlat ? 1 : 48;
    const std::size_t cols = in.size() / rows;
    std::size_t at = 77;
    for (const float bad : {inf, -inf, std::nanf(""), -std::nanf(""), inf, std::nanf("")}) {
      in[at] = from_float<TypeParam>(bad);
      at = at * 2 + 131;
    }
    in.back() = from_float<TypeParam>(-inf);
    check(c, in, rows, cols, NonFinite::kError, kOne);
    check(c, in, rows, cols, NonFinite::kSaturate, kOne);
    std::fill(in.begin(), in.end(), from_float<TypeParam>(inf));
    check(c, in, rows, cols, NonFinite::kSaturate, kOne);
  }
}

TEST(GpuDoubleQuantize, BytesOfTheCpu) {
  std::mt19937 random(6);
  std::lognormal_distribution<float> spread(-3.0f, 2.0f);
  DynamicBounds bounds;
  std::copy(dynamic_bounds().begin(), dynamic_bounds().end(), bounds.values);
  for (const std::size_t count : {0u, 1u, 31u, 255u, 256u, 257u, 1000u, 2048u})
    for (const bool equal : {false, true}) {
      std::vector<float> scales(count);
      for (float& s : scales) s = equal ? 0.25f : spread(random);
      const std::size_t groups = ceil_div(count, kScaleGroup);
      std::vector<std::uint8_t> want_codes(count), codes(count);
      std::vector<float> want_groups(groups), got_groups(groups), offset(1);
      float want_offset = -1;
      double_quantize(scales.data(), count, want_codes.data(), want_groups.data(), &want_offset,
                      serial_for);
      const std::vector<Range> memory = {host::input(scales), host::output(offset),
                                         host::output(codes), host::output(got_groups)};
      for (const Order order : host::kOrders) {
        host::launch({1, 1, kGroupThreads}, memory, order,
                     [&] { mean_scale_kernel<>(scales.data(), count, offset.data()); });
        host::launch({static_cast<unsigned>(groups), 1, kGroupThreads}, memory, order, [&] {
          quantize_scales_kernel<>(scales.data(), count, offset.data(), bounds, codes.data(),
                                   got_groups.data());
        });
        ASSERT_EQ(as_bits(offset[0]), as_bits(want_offset));
        ASSERT_EQ(got_groups, want_groups);
        ASSERT_EQ(codes, want_codes);
      }
    }
}

}  // namespace
}  // namespace monograph::gpu
