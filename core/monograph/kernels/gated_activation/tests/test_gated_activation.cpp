// Every variant against double, and against each other bit by bit: every 16-bit gate, a sweep of
// fp32.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/kernels/gated_activation/gated_activation.h"

namespace monograph {
namespace {

constexpr Activation kAll[] = {Activation::kSilu, Activation::kGeluTanh, Activation::kGelu};

double exact(Activation activation, double x) {
  switch (activation) {
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    case Activation::kGeluTanh:
      return x / (1 + std::exp(-2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kGelu:
      break;
  }
  return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
}

double exact_slope(Activation activation, double x) {
  if (activation == Activation::kGelu)
    return 0.5 * std::erfc(-x / std::sqrt(2.0)) + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
  const bool silu = activation == Activation::kSilu;
  const double z = silu ? x : 2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
  const double dz = silu ? 1 : 2 * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
  const double s = 1 / (1 + std::exp(-z));
  return s + x * s * (1 / (1 + std::exp(z))) * dz;
}

// Below it e^-z leaves fp32 and the result, smaller than 1e-35, becomes -0.
double least(Activation activation) {
  if (activation == Activation::kSilu) return -87;
  return activation == Activation::kGeluTanh ? -10 : -1e39;
}

template <class T>
std::vector<T> every_gate() {
  std::vector<T> gates;
  if constexpr (sizeof(T) == 2) {
    for (unsigned bits = 0; bits < 65536; ++bits)
      gates.push_back({static_cast<std::uint16_t>(bits)});
  } else {
    for (std::uint64_t bits = 0; bits < (1ull << 32); bits += 49999)
      gates.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
    for (float x = -20; x < 20; x += 0.000731f) gates.push_back(x);
  }
  return gates;
}

template <class T>
double unit_at(double x) {
  const int digits = sizeof(T) == 4 ? 24 : dtype_of<T> == DType::kBFloat16 ? 8 : 11;
  const int least = dtype_of<T> == DType::kFloat16 ? -14 : -126;
  return std::ldexp(1, std::max(x == 0 ? least : std::ilogb(x), least) - digits + 1);
}

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <class T>
struct Result {
  std::vector<T> y, dgate, dup;
};

template <class T>
Result<T> run(const GatedKernels& kernels, Activation activation, const std::vector<T>& gate) {
  const std::size_t n = gate.size();
  const std::vector<T> ones(n, from_float<T>(1.f));
  Result<T> r = {std::vector<T>(n), std::vector<T>(n), std::vector<T>(n)};
  kernels.forward({dtype_of<T>, activation, 1, n, gate.data(), ones.data(), n, n, r.y.data()}, 0, 0,
                  n);
  kernels.backward({dtype_of<T>, activation, 1, n, ones.data(), gate.data(), ones.data(), n, n, n,
                    r.dgate.data(), r.dup.data()},
                   0, 0, n);
  return r;
}

template <class T>
void check_type() {
  const std::vector<T> gate = every_gate<T>();
  for (const Activation activation : kAll) {
    const Result<T> scalar =
        run(*best_row(gated_activation_variants(), Isa::kScalar, dtype_of<T>, activation)->run,
            activation, gate);
    double worst = 0, worst_size = 0, worst_slope = 0;
    for (std::size_t i = 0; i < gate.size(); ++i) {
      const double x = to_float(gate[i]);
      if (!std::isfinite(x) || x < least(activation)) continue;
      const double want = exact(activation, x), got = to_float(scalar.y[i]);
      worst = std::max(worst, std::abs(got - want) / unit_at<T>(want));
      worst_size = std::max(
          worst_size, (std::abs(got - want) - 0.51 * unit_at<T>(want)) / (std::abs(x) + 1e-30));
      const double slope = exact_slope(activation, std::min(std::max(x, -1e3), 1e3));
      worst_slope = std::max(
          worst_slope, std::abs(to_float(scalar.dgate[i]) - slope) - 0.51 * unit_at<T>(slope));
      ASSERT_EQ(std::memcmp(&scalar.y[i], &scalar.dup[i], sizeof(T)), 0) << x;
    }
    const std::string name =
        std::to_string(static_cast<int>(activation)) + " " + name_of(dtype_of<T>);
    testing::Test::RecordProperty("units " + name, std::to_string(worst));
    // A 16-bit type: half a unit, the rounding; fp32 by its own error, which for gelu grows with
    // the exponent of e^-z.
    if (sizeof(T) == 2 || activation == Activation::kSilu)
      EXPECT_LE(worst, sizeof(T) == 2 ? 0.51 : 2.1) << name;
    EXPECT_LE(worst_size, 0x1p-22) << name;
    EXPECT_LE(worst_slope, 0x1p-20) << name;
    for (const auto& variant : gated_activation_variants()) {
      if (variant.isa > best_isa() || variant.dtype != dtype_of<T> ||
          variant.activation != activation)
        continue;
      const Result<T> got = run(*variant.run, activation, gate);
      EXPECT_TRUE(same(got.y, scalar.y)) << name_of(variant.isa) << " " << name;
      EXPECT_TRUE(same(got.dgate, scalar.dgate)) << name_of(variant.isa) << " " << name;
      EXPECT_TRUE(same(got.dup, scalar.dup)) << name_of(variant.isa) << " " << name;
    }
  }
}

TEST(GatedActivation, EveryBf16GateOnEveryVariant) { check_type<Bf16>(); }
TEST(GatedActivation, EveryFp16GateOnEveryVariant) { check_type<Fp16>(); }
TEST(GatedActivation, ASweepOfFp32OnEveryVariant) { check_type<float>(); }

TEST(GatedActivation, StridesTailsAndThreads) {
  ThreadPool pool(3);
  const auto parallel = [&](std::size_t count, std::size_t grain, ParallelBody body) {
    pool.parallel_for(count, grain, body);
  };
  for (const std::size_t cols : {1, 15, 64, 70, 1000, 40000}) {
    const std::size_t rows = 3;
    std::vector<float> both(rows * 2 * cols), dy(rows * cols);
    for (std::size_t i = 0; i < both.size(); ++i) both[i] = std::sin(static_cast<float>(i));
    for (std::size_t i = 0; i < dy.size(); ++i) dy[i] = std::cos(static_cast<float>(i));
    std::vector<float> y(rows * cols), dgate(rows * cols), dup(rows * cols);
    gated_activation({DType::kFloat32, Activation::kSilu, rows, cols, both.data(),
                      both.data() + cols, 2 * cols, 2 * cols, y.data()},
                     parallel);
    gated_activation_backward(
        {DType::kFloat32, Activation::kSilu, rows, cols, dy.data(), both.data(), both.data() + cols,
         cols, 2 * cols, 2 * cols, dgate.data(), dup.data()},
        parallel);
    for (std::size_t r = 0; r < rows; ++r)
      for (std::size_t i = 0; i < cols; ++i) {
        const double g = both[r * 2 * cols + i], u = both[r * 2 * cols + cols + i];
        const double d = dy[r * cols + i];
        ASSERT_NEAR(y[r * cols + i], exact(Activation::kSilu, g) * u, 3e-7);
        ASSERT_NEAR(dup[r * cols + i], exact(Activation::kSilu, g) * d, 3e-7);
        ASSERT_NEAR(dgate[r * cols + i], exact_slope(Activation::kSilu, g) * u * d, 5e-7);
      }
  }
}

}  // namespace
}  // namespace monograph
