// Every variant against double, and against each other bit by bit: both layouts, partial
// dimensions, with and without a norm.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/base/tests/random_elements.h"
#include "monograph/kernels/rotary/rotary.h"

namespace monograph {
namespace {

constexpr std::size_t kTokens = 6, kHeads = 3, kAngles = 3;

template <class T>
struct Case {
  std::size_t size, rotated;
  bool interleaved, norm;
  std::vector<T> x, dy, cos, sin;
  std::vector<float> gain;

  Case(std::size_t s, std::size_t r, bool inter, bool with_norm)
      : size(s),
        rotated(r),
        interleaved(inter),
        norm(with_norm),
        x(random_elements<T>(kTokens * kHeads * s, 1)),
        dy(random_elements<T>(kTokens * kHeads * s, 2)),
        cos(random_elements<T>(kAngles * r, 3)),
        sin(random_elements<T>(kAngles * r, 4)),
        gain(random_elements<float>(s, 5)) {}

  struct Result {
    std::vector<T> y, dx;
    std::vector<float> dgain;
  };
  RotaryProblem problem() const {
    return {dtype_of<T>, kTokens,
            kHeads,      size,
            rotated,     interleaved,
            cos.data(),  sin.data(),
            kAngles,     norm ? gain.data() : nullptr,
            1e-6f,       NormRounding::kBeforeGain};
  }
  Result run(const RotaryKernels& kernels) const {
    Result out = {std::vector<T>(x.size()), std::vector<T>(x.size()), std::vector<float>(size)};
    const HeadRows rows = {x.data(), kHeads * size, size}, above = {dy.data(), kHeads * size, size};
    kernels.forward({problem(), rows, out.y.data()}, 0, kTokens);
    float* dgain = norm ? out.dgain.data() : nullptr;
    kernels.backward({problem(), above, rows, out.dx.data(), dgain}, 0, kTokens, dgain);
    return out;
  }
  // The pair's other element, and the sign it has in r.
  std::size_t other(std::size_t i) const {
    if (interleaved) return i % 2 == 0 ? i + 1 : i - 1;
    return i < rotated / 2 ? i + rotated / 2 : i - rotated / 2;
  }
  double sign(std::size_t i) const { return (interleaved ? i % 2 == 0 : i < rotated / 2) ? -1 : 1; }
  // float only: its roundings are far below what a wrong index makes.
  void check(const Result& got) const {
    std::vector<double> dgain(size);
    for (std::size_t row = 0; row < kTokens * kHeads; ++row) {
      const std::size_t angle = row / kHeads % kAngles * rotated;
      std::vector<double> v(size), g(size);
      double squares = 0, dots = 0;
      for (std::size_t i = 0; i < size; ++i) squares += std::pow(to_float(x[row * size + i]), 2);
      const double k = 1 / std::sqrt(squares / double(size) + 1e-6);
      for (std::size_t i = 0; i < size; ++i)
        v[i] = to_float(x[row * size + i]) * (norm ? k * gain[i] : 1);
      for (std::size_t i = 0; i < size; ++i) {
        const bool turns = i < rotated;
        const double c = turns ? to_float(cos[angle + i]) : 1;
        double want = v[i] * c;
        g[i] = to_float(dy[row * size + i]) * c;
        if (turns) {
          const std::size_t j = other(i);
          want += sign(i) * v[j] * to_float(sin[angle + i]);
          g[i] += sign(j) * double(to_float(dy[row * size + j])) * to_float(sin[angle + j]);
        }
        ASSERT_NEAR(to_float(got.y[row * size + i]), want, 1e-5);
        dots += g[i] * gain[i] * to_float(x[row * size + i]);
      }
      for (std::size_t i = 0; i < size; ++i) {
        const double e = to_float(x[row * size + i]);
        const double want = norm ? g[i] * gain[i] * k - e * k * k * k * dots / double(size) : g[i];
        ASSERT_NEAR(to_float(got.dx[row * size + i]), want, 2e-5);
        dgain[i] += g[i] * e * k;
      }
    }
    if (norm)
      for (std::size_t i = 0; i < size; ++i) ASSERT_NEAR(got.dgain[i], dgain[i], 1e-4);
  }
};

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <class T>
void check_shapes() {
  const std::size_t shapes[][2] = {{128, 128}, {64, 32}, {80, 80}, {2, 2}, {70, 22}, {256, 64}};
  for (const auto& [size, rotated] : shapes)
    for (const bool interleaved : {false, true})
      for (const bool norm : {false, true}) {
        const Case<T> made(size, rotated, interleaved, norm);
        const auto scalar = made.run(*best_row(rotary_variants(), Isa::kScalar, dtype_of<T>)->run);
        if (sizeof(T) == 4) made.check(scalar);
        for (const auto& variant : rotary_variants()) {
          if (variant.isa > best_isa() || variant.dtype != dtype_of<T>) continue;
          const auto got = made.run(*variant.run);
          EXPECT_TRUE(same(got.y, scalar.y) && same(got.dx, scalar.dx) &&
                      same(got.dgain, scalar.dgain))
              << name_of(variant.isa) << " " << size << " of which " << rotated;
        }
      }
}

TEST(Rotary, Fp32IsRightOnEveryVariant) { check_shapes<float>(); }
TEST(Rotary, Bf16HasTheSameBitsOnEveryVariant) { check_shapes<Bf16>(); }
TEST(Rotary, Fp16HasTheSameBitsOnEveryVariant) { check_shapes<Fp16>(); }

}  // namespace
}  // namespace monograph
