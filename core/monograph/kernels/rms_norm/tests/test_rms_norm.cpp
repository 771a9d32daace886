// Every variant against double, and against each other bit by bit: sizes around the blocks of 64,
// with and without a residual, both roundings, every type.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/base/tests/random_elements.h"
#include "monograph/kernels/rms_norm/rms_norm.h"

namespace monograph {
namespace {

template <class T, class Y>
struct Case {
  std::size_t rows, cols, stride;
  std::vector<T> x, residual, dsum;
  std::vector<Y> dy;
  std::vector<float> gain;
  bool with_residual;
  NormRounding rounding;

  Case(std::size_t r, std::size_t c, bool with, NormRounding how)
      : rows(r),
        cols(c),
        stride(c + 3),
        x(random_elements<T>(r * stride, 1)),
        residual(random_elements<T>(r * stride, 2)),
        dsum(random_elements<T>(r * stride, 3)),
        dy(random_elements<Y>(r * stride, 4)),
        gain(random_elements<float>(c, 5)),
        with_residual(with),
        rounding(how) {}

  struct Result {
    std::vector<T> sum, dx;
    std::vector<Y> y;
    std::vector<float> dgain;
  };
  RmsNormForward forward(Result& out) const {
    out.sum.assign(with_residual ? rows * cols : 0, T{});
    out.y.assign(rows * cols, Y{});
    return {dtype_of<T>, dtype_of<Y>, rounding, rows,
            cols,        x.data(),    stride,   with_residual ? residual.data() : nullptr,
            stride,      gain.data(), 1e-6f,    with_residual ? out.sum.data() : nullptr,
            out.y.data()};
  }
  RmsNormBackward backward(Result& out) const {
    out.dx.assign(rows * cols, T{});
    out.dgain.assign(cols, 0.f);
    const T* s = with_residual ? out.sum.data() : x.data();
    return {dtype_of<T>,
            dtype_of<Y>,
            rounding,
            rows,
            cols,
            dy.data(),
            stride,
            with_residual ? dsum.data() : nullptr,
            stride,
            s,
            with_residual ? cols : stride,
            gain.data(),
            1e-6f,
            out.dx.data(),
            out.dgain.data()};
  }
  Result run(const RmsNormKernels& kernels) const {
    Result out;
    kernels.forward(forward(out), 0, rows);
    const RmsNormBackward job = backward(out);
    kernels.backward(job, 0, rows, out.dgain.data());
    return out;
  }
  void check(const Result& got) const {
    // Sums of squares: one rounding a term, one a block and lane, six folds; the root halves it.
    const double fp32 = (static_cast<double>(cols) / 64 + 24) * 0x1p-24;
    std::vector<double> dgain(cols), dgain_size(cols);
    for (std::size_t r = 0; r < rows; ++r) {
      std::vector<double> s(cols);
      double squares = 0, dots = 0, sizes = 0;
      for (std::size_t i = 0; i < cols; ++i) {
        const float a = to_float(x[r * stride + i]), b = to_float(residual[r * stride + i]);
        s[i] = with_residual ? to_float(from_float<T>(a + b)) : a;
        if (with_residual) ASSERT_EQ(s[i], to_float(got.sum[r * cols + i]));
        const double g = double(to_float(dy[r * stride + i])) * gain[i];
        squares += s[i] * s[i];
        dots += g * s[i];
        sizes += std::abs(g * s[i]);
      }
      const double k = 1 / std::sqrt(squares / double(cols) + 1e-6);
      for (std::size_t i = 0; i < cols; ++i) {
        const double d = to_float(dy[r * stride + i]), g = d * gain[i];
        const double want = s[i] * k * gain[i];
        const double inner = rounding == NormRounding::kBeforeGain ? 1.01 * kUnit<T> : 0;
        ASSERT_NEAR(to_float(got.y[r * cols + i]), want,
                    std::abs(want) * (fp32 + inner + 1.01 * kUnit<Y>)+1e-7)
            << "row " << r << " of " << cols << ", " << i;
        const double first = g * k, second = s[i] * k * k * k * dots / double(cols);
        const double third = with_residual ? double(to_float(dsum[r * stride + i])) : 0;
        const double size =
            std::abs(first) + std::abs(third) + std::abs(s[i]) * k * k * k * sizes / double(cols);
        ASSERT_NEAR(to_float(got.dx[r * cols + i]), first - second + third,
                    4 * fp32 * size + 1.01 * kUnit<T> * std::abs(first - second + third) + 1e-7);
        dgain[i] += d * s[i] * k;
        dgain_size[i] += std::abs(d * s[i] * k);
      }
    }
    const double inner = rounding == NormRounding::kBeforeGain ? kUnit<T> : 0;
    for (std::size_t i = 0; i < cols; ++i)
      ASSERT_NEAR(got.dgain[i], dgain[i],
                  dgain_size[i] * (fp32 + 1.01 * inner + double(rows) * 0x1p-24) + 1e-7);
  }
};

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <class T, class Y>
const RmsNormKernels& scalar_kernels() {
  return *best_row(rms_norm_variants(), Isa::kScalar, dtype_of<T>, dtype_of<Y>)->run;
}

template <class T, class Y>
void check_sizes() {
  for (const std::size_t cols : {1, 7, 16, 63, 64, 65, 96, 127, 128, 200, 1024, 1031})
    for (const bool with : {false, true})
      for (const NormRounding how : {NormRounding::kBeforeGain, NormRounding::kOnce}) {
        const Case<T, Y> made(5, cols, with, how);
        const auto scalar = made.run(scalar_kernels<T, Y>());
        made.check(scalar);
        for (const auto& variant : rms_norm_variants()) {
          if (variant.isa > best_isa() || variant.dtype != dtype_of<T> ||
              variant.out_dtype != dtype_of<Y>)
            continue;
          const auto got = made.run(*variant.run);
          EXPECT_TRUE(same(got.y, scalar.y) && same(got.sum, scalar.sum) &&
                      same(got.dx, scalar.dx) && same(got.dgain, scalar.dgain))
              << name_of(variant.isa) << " with " << cols << " columns differs from scalar";
        }
      }
}

TEST(RmsNorm, EveryVariantIsRightAndGivesTheSameBits) {
  check_sizes<float, float>();
  check_sizes<Bf16, Bf16>();
  check_sizes<Fp16, Fp16>();
  check_sizes<Bf16, float>();
  check_sizes<Fp16, float>();
}

TEST(RmsNorm, ThreadsAndNeighboursDoNotChangeABit) {
  const Case<Bf16, Bf16> made(1000, 70, true, NormRounding::kBeforeGain);
  Case<Bf16, Bf16>::Result one;
  rms_norm(made.forward(one), serial_for);
  rms_norm_backward(made.backward(one), serial_for);
  for (const int threads : {2, 3}) {
    ThreadPool pool(threads);
    const auto parallel = [&](std::size_t count, std::size_t grain, ParallelBody body) {
      pool.parallel_for(count, grain, body);
    };
    Case<Bf16, Bf16>::Result other;
    rms_norm(made.forward(other), parallel);
    rms_norm_backward(made.backward(other), parallel);
    EXPECT_TRUE(same(one.y, other.y) && same(one.sum, other.sum) && same(one.dx, other.dx) &&
                same(one.dgain, other.dgain));
  }
  Case<Bf16, Bf16> alone(1, 70, true, NormRounding::kBeforeGain);
  alone.x.assign(made.x.begin() + 500 * 73, made.x.begin() + 501 * 73);
  alone.residual.assign(made.residual.begin() + 500 * 73, made.residual.begin() + 501 * 73);
  Case<Bf16, Bf16>::Result single;
  rms_norm(alone.forward(single), serial_for);
  EXPECT_EQ(std::memcmp(single.y.data(), one.y.data() + 500 * 70, 140), 0);
}

TEST(RmsNorm, ValuesThatAreNotFinite) {
  for (const float odd : {INFINITY, -INFINITY, NAN}) {
    Case<Bf16, Bf16> made(2, 70, false, NormRounding::kBeforeGain);
    made.x[69] = from_float<Bf16>(odd);
    for (const auto& variant : rms_norm_variants()) {
      if (variant.isa > best_isa() || variant.dtype != DType::kBFloat16 ||
          variant.out_dtype != DType::kBFloat16)
        continue;
      const auto got = made.run(*variant.run);
      EXPECT_TRUE(std::isnan(to_float(got.y[69])));
      EXPECT_EQ(std::isnan(to_float(got.y[0])), std::isnan(odd));  // x / infinity is 0
      EXPECT_FALSE(std::isnan(to_float(got.y[70])));
    }
  }
}

}  // namespace
}  // namespace monograph
