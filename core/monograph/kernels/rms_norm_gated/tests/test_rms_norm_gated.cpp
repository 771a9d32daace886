// Every variant against double, and against each other bit by bit: sizes around the blocks of 64,
// both gates, the three ways of rounding, every type.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/base/tests/random_elements.h"
#include "monograph/kernels/rms_norm_gated/rms_norm_gated.h"

namespace monograph {
namespace {

template <class T>
struct Case {
  std::size_t rows, cols;
  Gate gate;
  NormRounding rounding;
  bool round_product;
  std::size_t stride = cols + 3;
  std::vector<T> x = random_elements<T>(rows * stride, 1), z = random_elements<T>(rows * stride, 2);
  std::vector<T> dy = random_elements<T>(rows * stride, 3);
  std::vector<float> gain = random_elements<float>(cols, 4);

  struct Result {
    std::vector<T> y, dx, dz;
    std::vector<float> dgain;
    bool operator==(const Result& other) const {
      const auto same = [](const auto& a, const auto& b) {
        return std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0;
      };
      return same(y, other.y) && same(dx, other.dx) && same(dz, other.dz) &&
             same(dgain, other.dgain);
    }
  };
  Result empty() const {
    const std::vector<T> none(rows * cols);
    return {none, none, none, std::vector<float>(cols)};
  }
  GatedNormProblem problem() const {
    return {dtype_of<T>, gate,     rounding, round_product, rows,        cols,
            x.data(),    z.data(), stride,   stride,        gain.data(), 1e-6f};
  }
  GatedNormBackward backward(Result& out) const {
    return {problem(), dy.data(), stride, out.dx.data(), out.dz.data(), out.dgain.data()};
  }
  Result run(const GatedNormKernels& kernels) const {
    Result out = empty();
    std::vector<float> scratch(2 * cols);
    kernels.forward({problem(), out.y.data()}, 0, rows);
    kernels.backward(backward(out), 0, rows, out.dgain.data(), scratch.data());
    return out;
  }
  Result run(ParallelFor parallel_for) const {
    Result out = empty();
    rms_norm_gated({problem(), out.y.data()}, parallel_for);
    rms_norm_gated_backward(backward(out), parallel_for);
    return out;
  }

  void check(const Result& got) const {
    const double fp32 = (static_cast<double>(cols) / 64 + 32) * 0x1p-24;
    const bool before = rounding == NormRounding::kBeforeGain;
    // What roundings on the way may move a product, relative to it.
    const double norm_unit = before ? kUnit<T> : 0;
    const double unit = norm_unit + (before && round_product ? kUnit<T> : 0) + 2 * fp32;
    std::vector<double> dgain(cols), sizes(cols);
    for (std::size_t r = 0; r < rows; ++r) {
      const T* xs = x.data() + r * stride;
      double squares = 0, dots = 0, size = 0;
      std::vector<double> d(cols);
      for (std::size_t i = 0; i < cols; ++i) squares += std::pow(to_float(xs[i]), 2);
      const double k = 1 / std::sqrt(squares / static_cast<double>(cols) + double{1e-6f});
      for (std::size_t i = 0; i < cols; ++i) {
        const double gates = to_float(z[r * stride + i]), s = 1 / (1 + std::exp(-gates));
        const bool silu = gate == Gate::kSilu;
        const double act = silu ? gates * s : s;
        const double slope = silu ? s + gates * s * (1 - s) : s * (1 - s);
        const double up = to_float(dy[r * stride + i]), m = to_float(xs[i]) * k * gain[i];
        const double y = m * act, dz = up * m * slope;
        ASSERT_NEAR(to_float(got.y[r * cols + i]), y,
                    (kUnit<T> + unit) * std::abs(y) * 1.02 + 1e-7);
        ASSERT_NEAR(to_float(got.dz[r * cols + i]), dz,
                    (kUnit<T> + unit) * std::abs(dz) * 1.02 + fp32 * std::abs(up * m) + 1e-7);
        d[i] = up * act;
        dots += d[i] * gain[i] * to_float(xs[i]);
        size += std::abs(d[i] * gain[i] * to_float(xs[i]));
        dgain[i] += d[i] * to_float(xs[i]) * k;
        sizes[i] += std::abs(d[i] * to_float(xs[i]) * k);
      }
      for (std::size_t i = 0; i < cols; ++i) {
        const double along = k * k * k / static_cast<double>(cols) * to_float(xs[i]);
        const double dx = d[i] * gain[i] * k - along * dots;
        const double terms = std::abs(d[i] * gain[i] * k) + std::abs(along) * size;
        ASSERT_NEAR(to_float(got.dx[r * cols + i]), dx,
                    kUnit<T> * std::abs(dx) * 1.02 + 4 * fp32 * terms + 1e-7);
      }
    }
    for (std::size_t i = 0; i < cols; ++i)
      ASSERT_NEAR(got.dgain[i], dgain[i],
                  (norm_unit + 4 * fp32 + static_cast<double>(rows) * 0x1p-24) * sizes[i] + 1e-6);
  }
};

template <class T>
void check_all(std::size_t rows, std::size_t cols) {
  for (const Gate gate : {Gate::kSilu, Gate::kSigmoid})
    for (const NormRounding rounding : {NormRounding::kBeforeGain, NormRounding::kOnce})
      for (const bool product : {false, true}) {
        const Case<T> c = {rows, cols, gate, rounding, product};
        std::vector<typename Case<T>::Result> found;
        for (const auto& row : rms_norm_gated_variants()) {
          if (row.dtype != dtype_of<T> || row.gate != gate || row.isa > best_isa()) continue;
          found.push_back(c.run(*row.run));
          c.check(found.back());
          if (testing::Test::HasFatalFailure()) FAIL() << cols << " " << name_of(row.isa);
          ASSERT_TRUE(found.back() == found.front()) << cols << " " << name_of(row.isa);
        }
        ASSERT_FALSE(found.empty());
      }
}

TEST(RmsNormGated, AgainstDoubleWithTheSameBitsEverywhere) {
  for (const std::size_t cols : {1, 7, 31, 64, 100, 128, 200, 8192}) {
    const std::size_t rows = cols > 1000 ? 2 : 5;
    check_all<float>(rows, cols);
    check_all<Bf16>(rows, cols);
    check_all<Fp16>(rows, cols);
    if (HasFatalFailure()) return;
  }
}

TEST(RmsNormGated, SameBitsForAnyNumberOfThreads) {
  const Case<Bf16> c = {4000, 128, Gate::kSilu, NormRounding::kBeforeGain, true};
  const auto one = c.run(serial_for);
  for (const int threads : {2, 3, 7}) {
    ThreadPool pool(threads);
    const auto many = c.run([&](std::size_t count, std::size_t grain, ParallelBody body) {
      pool.parallel_for(count, grain, body);
    });
    EXPECT_TRUE(many == one) << threads;
  }
}

// Where e^-z leaves fp32 the activations and slopes are what they tend to.
TEST(RmsNormGated, FarGates) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const auto& row : rms_norm_gated_variants()) {
    if (row.dtype != DType::kFloat32 || row.isa > best_isa()) continue;
    Case<float> c = {1, 6, row.gate, NormRounding::kOnce, false};
    c.x.assign(c.stride, 1.f);
    c.gain.assign(6, 1.f);
    c.dy.assign(c.stride, 1.f);
    c.z = {-200.f, 200.f, -3e38f, 3e38f, 0.f, std::nanf(""), 0, 0, 0};
    const auto got = c.run(*row.run);
    const bool silu = row.gate == Gate::kSilu;
    EXPECT_EQ(std::abs(got.y[0]), 0.f);
    EXPECT_NEAR(got.y[1], silu ? 200.f : 1.f, silu ? 1e-2 : 1e-6);
    EXPECT_EQ(std::abs(got.y[2]), 0.f);
    EXPECT_LT(got.y[3], inf);
    EXPECT_NEAR(got.dz[0], 0.f, 1e-30);
    EXPECT_NEAR(got.dz[1], silu ? 1.f : 0.f, 1e-5);
    EXPECT_NEAR(got.dz[4], silu ? 0.5f : 0.25f, 1e-6);
    EXPECT_TRUE(std::isnan(got.y[5]));
    EXPECT_TRUE(std::isnan(got.dz[5]));
  }
}

}  // namespace
}  // namespace monograph
