// Every variant against double, and against each other bit by bit: sizes around vectors and blocks,
// every type of gradient, several steps.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/base/tests/random_elements.h"
#include "monograph/kernels/adamw/adamw.h"

namespace monograph {
namespace {

constexpr double kUnit32 = 0x1p-24;

template <class T>
struct Trained {
  std::vector<T> gradient;
  std::vector<float> parameter, exp_avg, exp_avg_sq;

  explicit Trained(std::size_t size, unsigned seed = 1)
      : gradient(random_elements<T>(size, seed)),
        parameter(random_elements<float>(size, seed + 1)),
        exp_avg(random_elements<float>(size, seed + 2)),
        exp_avg_sq(size) {
    for (std::size_t i = 0; i < size; ++i) exp_avg_sq[i] = exp_avg[i] * exp_avg[i];
  }
  AdamwTensor tensor(double decay = 0.1, double step = 3) {
    return {gradient.size(), dtype_of<T>,       gradient.data(), parameter.data(),
            exp_avg.data(),  exp_avg_sq.data(), decay,           step};
  }
  bool operator==(const Trained& other) const {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    return same(parameter, other.parameter) && same(exp_avg, other.exp_avg) &&
           same(exp_avg_sq, other.exp_avg_sq);
  }
};

constexpr AdamwSettings kSettings = {3e-3, 0.9, 0.95, 1e-6, 0.375f};

// Loshchilov and Hutter's formulas in double, from the state before.
template <class T>
void check(const Trained<T>& before, const Trained<T>& after, double decay, double step) {
  const AdamwSettings& s = kSettings;
  for (std::size_t i = 0; i < before.gradient.size(); ++i) {
    const double g = double(to_float(before.gradient[i])) * s.clip;
    const double m = s.beta1 * before.exp_avg[i] + (1 - s.beta1) * g;
    const double v = s.beta2 * before.exp_avg_sq[i] + (1 - s.beta2) * g * g;
    const double root = std::sqrt(v / (1 - std::pow(s.beta2, step))) + s.eps;
    const double moved = s.rate * m / (1 - std::pow(s.beta1, step)) / root;
    const double p = before.parameter[i] * (1 - s.rate * decay) - moved;
    // Roundings: of g, of the difference, the product and the sum; of constants.
    const double m_size = std::abs(before.exp_avg[i]) + std::abs(g);
    ASSERT_NEAR(after.exp_avg[i], m, 5 * kUnit32 * m_size) << i;
    ASSERT_NEAR(after.exp_avg_sq[i], v, 6 * kUnit32 * v) << i;
    const double factor = s.rate / (1 - std::pow(s.beta1, step)) / root;
    ASSERT_NEAR(after.parameter[i], p,
                3 * kUnit32 * std::abs(before.parameter[i]) + 12 * kUnit32 * factor * m_size)
        << i;
  }
}

template <class T>
void check_sizes() {
  for (const std::size_t size : {0, 1, 7, 8, 15, 16, 17, 31, 33, 64, 100, 1031})
    for (const double decay : {0.0, 0.1})
      for (const double step : {1.0, 2.0, 1000.0}) {
        const Trained<T> start(size);
        Trained<T> scalar = start;
        for (const auto& variant : adamw_variants()) {
          if (variant.isa != Isa::kScalar || variant.dtype != dtype_of<T>) continue;
          const AdamwTensor tensor = scalar.tensor(decay, step);
          variant.run->update(tensor, adamw_numbers(tensor, kSettings), 0, size);
        }
        check(start, scalar, decay, step);
        const double squares = best_row(adamw_variants(), Isa::kScalar, dtype_of<T>)
                                   ->run->squares(start.gradient.data(), size);
        for (const auto& variant : adamw_variants()) {
          if (variant.isa > best_isa() || variant.dtype != dtype_of<T>) continue;
          Trained<T> got = start;
          const AdamwTensor tensor = got.tensor(decay, step);
          variant.run->update(tensor, adamw_numbers(tensor, kSettings), 0, size);
          EXPECT_TRUE(got == scalar) << name_of(variant.isa) << ", " << size << " elements";
          EXPECT_EQ(variant.run->squares(start.gradient.data(), size), squares)
              << name_of(variant.isa) << ", " << size << " elements";
        }
      }
}

TEST(Adamw, EveryVariantIsRightAndGivesTheSameBits) {
  check_sizes<float>();
  check_sizes<Bf16>();
  check_sizes<Fp16>();
}

TEST(Adamw, TheNormIsThatOfDouble) {
  // One fp32 chain is 0.035 % short here.
  const std::vector<float> large(10'000'000, 0x1.99999ap-4f);
  AdamwTensor tensor = {};
  tensor.size = large.size();
  tensor.gradient_dtype = DType::kFloat32;
  tensor.gradient = large.data();
  const double want = std::sqrt(1e7) * double(0x1.99999ap-4f);
  EXPECT_NEAR(gradient_norm({&tensor, 1}, serial_for), want, 1e-12 * want);
  const Trained<Bf16> drawn(100'003);
  double sum = 0;
  for (const Bf16 g : drawn.gradient) sum += double(to_float(g)) * double(to_float(g));
  AdamwTensor other = {};
  other.size = drawn.gradient.size();
  other.gradient_dtype = DType::kBFloat16;
  other.gradient = drawn.gradient.data();
  EXPECT_NEAR(gradient_norm({&other, 1}, serial_for), std::sqrt(sum), 1e-13 * std::sqrt(sum));
  EXPECT_EQ(gradient_norm({}, serial_for), 0.0);
}

TEST(Adamw, SquaresBeyondFloat32AreCounted) {
  for (const float value : {0x1p127f, 0x1p-149f, 3e-23f}) {
    const std::vector<float> gradient(5, value);
    AdamwTensor tensor = {};
    tensor.size = 5;
    tensor.gradient_dtype = DType::kFloat32;
    tensor.gradient = gradient.data();
    const double want = std::sqrt(5.0) * double(value);
    EXPECT_NEAR(gradient_norm({&tensor, 1}, serial_for), want, 1e-15 * want);
  }
}

TEST(Adamw, ThreadsAndTheOrderOfTensorsDoNotChangeABit) {
  const Trained<float> first(3 * kNormBlock + 5), second(1, 7), empty(0), third(kNormBlock, 11);
  const auto run = [&](ParallelFor parallel_for) {
    std::vector<Trained<float>> all = {first, second, empty, third};
    std::vector<AdamwTensor> tensors;
    for (auto& each : all) tensors.push_back(each.tensor());
    const double norm = gradient_norm(tensors, parallel_for);
    adamw(tensors, kSettings, parallel_for);
    return std::pair(norm, all);
  };
  const auto one = run(serial_for);
  check(first, one.second[0], 0.1, 3);
  check(third, one.second[3], 0.1, 3);
  for (const int threads : {2, 3}) {
    ThreadPool pool(threads);
    const auto other = run([&](std::size_t count, std::size_t grain, ParallelBody body) {
      pool.parallel_for(count, grain, body);
    });
    EXPECT_EQ(other.first, one.first);
    EXPECT_TRUE(other.second == one.second);
  }
}

TEST(Adamw, ValuesThatAreNotFinite) {
  for (const float odd : {INFINITY, -INFINITY, NAN})
    for (const std::size_t place : {0u, 20u, 69u}) {
      Trained<Bf16> made(70);
      made.gradient[place] = from_float<Bf16>(odd);
      const AdamwTensor tensor = made.tensor();
      EXPECT_FALSE(std::isfinite(gradient_norm({&tensor, 1}, serial_for)));
    }
}

}  // namespace
}  // namespace monograph
