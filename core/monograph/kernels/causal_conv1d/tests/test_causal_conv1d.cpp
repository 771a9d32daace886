// Every variant against a few lines in double, and against each other bit by bit: one to eight
// taps, channels around the blocks of 64, both layouts, gaps, empty and short documents, states,
// NaN outside documents, every type.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"
#include "monograph/base/tests/random_elements.h"
#include "monograph/kernels/causal_conv1d/causal_conv1d.h"

namespace monograph {
namespace {

// Gaps at both ends; documents that are empty, of one token, shorter than the taps, of a tile and
// more.
const std::vector<std::int32_t> kBorders = {3, 3, 4, 9, 9, 73, 202, 205, 205};
constexpr std::size_t kTokens = 211;

template <class T, class P>
struct Case {
  std::size_t channels, taps;
  bool transposed, silu, with_bias, with_state;
  std::size_t documents = kBorders.size() - 1, past = taps - 1;
  std::size_t stride = transposed ? kTokens + 5 : channels + 3;
  std::size_t size = stride * (transposed ? channels : kTokens);
  std::vector<T> x = random_elements<T>(size, 1), dy = random_elements<T>(size, 2);
  std::vector<T> state = random_elements<T>(documents * channels * past + 1, 3);
  std::vector<T> dfinal = random_elements<T>(documents * channels * past + 1, 4);
  std::vector<P> weight = random_elements<P>(channels * taps, 5);
  std::vector<P> bias = random_elements<P>(channels, 6);

  std::size_t place(std::size_t t, std::size_t c) const {
    return transposed ? c * stride + t : t * stride + c;
  }
  TokensView view(const std::vector<T>& v) const {
    return {v.data(), transposed ? 1 : stride, transposed ? stride : 1};
  }
  // What lies outside documents must not be read.
  void spoil() {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (std::size_t c = 0; c < channels; ++c)
      for (std::size_t t = 0; t < kTokens; ++t)
        if (t < 3 || t >= 205) x[place(t, c)] = dy[place(t, c)] = from_float<T>(nan);
  }

  struct Result {
    std::vector<T> y, final_state, dx, dstate;
    std::vector<float> dweight, dbias;
    bool operator==(const Result& other) const {
      const auto same = [](const auto& a, const auto& b) {
        return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0;
      };
      return same(y, other.y) && same(final_state, other.final_state) && same(dx, other.dx) &&
             same(dstate, other.dstate) && same(dweight, other.dweight) && same(dbias, other.dbias);
    }
  };
  Result run(ParallelFor parallel_for) const {
    Result out;
    const T none = from_float<T>(7.f);
    out.y.assign(kTokens * channels, none);
    out.dx = out.y;
    out.final_state.assign(documents * channels * past + 1, none);
    out.dstate = out.final_state;
    out.dweight.assign(channels * taps, 7.f);
    out.dbias.assign(channels, 7.f);
    const ConvProblem problem = {dtype_of<T>,
                                 dtype_of<P>,
                                 dtype_of<P>,
                                 kTokens,
                                 channels,
                                 taps,
                                 silu,
                                 view(x),
                                 weight.data(),
                                 with_bias ? bias.data() : nullptr,
                                 documents,
                                 kBorders.data(),
                                 with_state ? state.data() : nullptr};
    causal_conv1d({problem, out.y.data(), out.final_state.data()}, parallel_for);
    causal_conv1d_backward({problem, view(dy), dfinal.data(), out.dx.data(), out.dweight.data(),
                            out.dbias.data(), with_state ? out.dstate.data() : nullptr},
                           parallel_for);
    return out;
  }

  // Sums and the sums of the sizes of their terms, which bound the error.
  struct Sum {
    double value = 0, size = 0;
    void add(double term) { value += term, size += std::abs(term); }
  };
  void check(const Result& got) const {
    // A dozen roundings of fp32 in s and the activation, and up to 211 terms in a weight's sum.
    const double few = 24 * 0x1p-24, many = 256 * 0x1p-24;
    for (std::size_t c = 0; c < channels; ++c) {
      std::vector<Sum> dweight(taps);
      Sum dbias;
      for (std::size_t n = 0; n < documents; ++n) {
        const auto first = static_cast<std::ptrdiff_t>(kBorders[n]);
        const std::ptrdiff_t count = kBorders[n + 1] - first;
        const std::ptrdiff_t back = static_cast<std::ptrdiff_t>(past);
        const auto state_at = [&](std::ptrdiff_t i) {
          return (n * channels + c) * past + static_cast<std::size_t>(i);
        };
        const auto input = [&](std::ptrdiff_t e) -> double {
          if (e >= 0) return to_float(x[place(static_cast<std::size_t>(first + e), c)]);
          return with_state ? to_float(state[state_at(back + e)]) : 0.;
        };
        std::vector<Sum> din(static_cast<std::size_t>(count + back));  // from the state on
        for (std::ptrdiff_t t = 0; t < count; ++t) {
          Sum s;
          if (with_bias) s.add(to_float(bias[c]));
          for (std::size_t j = 0; j < taps; ++j)
            s.add(to_float(weight[c * taps + j]) *
                  input(t - back + static_cast<std::ptrdiff_t>(j)));
          const double sigmoid = 1 / (1 + std::exp(-s.value));
          const double want = silu ? s.value * sigmoid : s.value;
          const auto token = static_cast<std::size_t>(first + t);
          ASSERT_NEAR(to_float(got.y[token * channels + c]), want,
                      1.01 * kUnit<T> * std::abs(want) + few * s.size + 1e-7)
              << c << " " << token;
          const double slope = silu ? sigmoid + s.value * sigmoid * (1 - sigmoid) : 1;
          const double d = to_float(dy[place(token, c)]) * slope;
          dbias.add(d);
          for (std::size_t j = 0; j < taps; ++j) {
            const std::ptrdiff_t e = t - back + static_cast<std::ptrdiff_t>(j);
            dweight[j].add(d * input(e));
            din[static_cast<std::size_t>(e + back)].add(to_float(weight[c * taps + j]) * d);
          }
        }
        for (std::ptrdiff_t i = 0; i < back; ++i) {
          ASSERT_EQ(to_float(got.final_state[state_at(i)]), input(count - back + i));
          din[static_cast<std::size_t>(count + i)].add(to_float(dfinal[state_at(i)]));
        }
        for (std::ptrdiff_t e = with_state ? -back : 0; e < count; ++e) {
          const Sum& want = din[static_cast<std::size_t>(e + back)];
          const float found =
              to_float(e < 0 ? got.dstate[state_at(back + e)]
                             : got.dx[static_cast<std::size_t>(first + e) * channels + c]);
          // The slope knows s to within its own error.
          ASSERT_NEAR(found, want.value,
                      1.01 * kUnit<T> * std::abs(want.value) + 8 * few * want.size + 1e-6);
        }
      }
      for (std::size_t j = 0; j < taps; ++j)
        ASSERT_NEAR(got.dweight[c * taps + j], dweight[j].value, many * dweight[j].size + 1e-5);
      ASSERT_NEAR(got.dbias[c], dbias.value, many * dbias.size + 1e-5);
      for (std::size_t t = 0; t < kTokens; ++t)
        if (t < 3 || t >= 205) {
          ASSERT_EQ(to_float(got.y[t * channels + c]), 0.f);
          ASSERT_EQ(to_float(got.dx[t * channels + c]), 0.f);
        }
    }
  }
};

template <class T, class P>
void check_all(std::size_t channels, std::size_t taps) {
  for (int bits = 0; bits < 16; ++bits) {
    Case<T, P> c = {channels,        taps,           (bits & 1) != 0, (bits & 2) != 0,
                    (bits & 4) != 0, (bits & 8) != 0};
    c.spoil();
    c.check(c.run(serial_for));
    if (testing::Test::HasFatalFailure()) FAIL() << channels << " " << taps << " " << bits;
  }
}

TEST(CausalConv1d, AgainstDoubleForEveryNumberOfTaps) {
  for (std::size_t taps = 1; taps <= kMostTaps; ++taps) {
    check_all<Bf16, Bf16>(67, taps);
    if (HasFatalFailure()) return;
  }
}

TEST(CausalConv1d, AgainstDoubleForEveryTypeAndWidth) {
  for (const std::size_t channels : {1, 15, 64, 80, 129}) {
    check_all<float, float>(channels, 4);
    check_all<Fp16, float>(channels, 3);
    check_all<Bf16, float>(channels, 4);
    if (HasFatalFailure()) return;
  }
}

// The kernels of each instruction set on the same tiles.
template <class T>
void same_bits() {
  const Case<T, T> given = {131, 4, false, true, true, true};
  std::vector<std::vector<T>> found;
  std::vector<std::vector<float>> sums;
  for (const auto& row : causal_conv1d_variants()) {
    if (row.dtype != dtype_of<T> || row.isa > best_isa()) continue;
    for (const bool transposed : {false, true}) {
      Case<T, T> c = {131, 4, transposed, true, true, true};
      for (std::size_t t = 0; t < kTokens; ++t)
        for (std::size_t k = 0; k < c.channels; ++k) {
          c.x[c.place(t, k)] = given.x[given.place(t, k)];
          c.dy[c.place(t, k)] = given.dy[given.place(t, k)];
        }
      const ConvProblem problem = {
          dtype_of<T>,   dtype_of<T>, dtype_of<T>,     kTokens,       c.channels,  4,
          true,          c.view(c.x), c.weight.data(), c.bias.data(), c.documents, kBorders.data(),
          c.state.data()};
      std::vector<T> out(2 * kTokens * c.channels), states(c.documents * c.channels * 3);
      std::vector<float> total(5 * c.channels);
      const ConvTile tiles[] = {
          {4, 9, 73, 9, 73}, {5, 73, 137, 73, 202}, {5, 137, 201, 73, 202}, {5, 201, 202, 73, 202}};
      const ConvForward forward = {problem, out.data(), nullptr};
      const ConvBackward backward = {
          problem,      c.view(c.dy), c.dfinal.data(), out.data() + kTokens * c.channels,
          total.data(), total.data(), states.data()};
      row.run->forward(forward, tiles, 4, 0, c.channels);
      row.run->backward(backward, tiles, 4, 0, c.channels, total.data());
      out.insert(out.end(), states.begin(), states.end());
      found.push_back(out);
      sums.push_back(total);
    }
  }
  for (std::size_t i = 1; i < found.size(); ++i) {
    ASSERT_EQ(std::memcmp(found[i].data(), found[0].data(), found[0].size() * sizeof(T)), 0) << i;
    ASSERT_EQ(std::memcmp(sums[i].data(), sums[0].data(), sums[0].size() * 4), 0) << i;
  }
}

TEST(CausalConv1d, SameBitsOnEveryInstructionSetAndInBothLayouts) {
  same_bits<Bf16>();
  same_bits<Fp16>();
  same_bits<float>();
}

TEST(CausalConv1d, SameBitsForAnyNumberOfThreads) {
  Case<Bf16, Bf16> c = {700, 4, false, true, true, true};
  const auto one = c.run(serial_for);
  for (const int threads : {2, 3, 7}) {
    ThreadPool pool(threads);
    const auto many = c.run([&](std::size_t count, std::size_t grain, ParallelBody body) {
      pool.parallel_for(count, grain, body);
    });
    EXPECT_TRUE(many == one) << threads;
  }
}

TEST(CausalConv1d, WrongBordersAreNamed) {
  Case<float, float> c = {4, 2, false, true, false, false};
  const auto message = [&](std::vector<std::int32_t> borders) -> std::string {
    std::vector<float> y(kTokens * 4);
    const ConvProblem problem = {DType::kFloat32,
                                 DType::kFloat32,
                                 DType::kFloat32,
                                 kTokens,
                                 4,
                                 2,
                                 true,
                                 c.view(c.x),
                                 c.weight.data(),
                                 nullptr,
                                 borders.size() - 1,
                                 borders.data(),
                                 nullptr};
    try {
      causal_conv1d({problem, y.data(), nullptr}, serial_for);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message({0, 5, 4}), "causal_conv1d: cu[2] is 4, below the one before it");
  EXPECT_EQ(message({0, 212}), "causal_conv1d: cu ends at 212, there are 211 tokens");
  EXPECT_EQ(message({-1, 2}), "causal_conv1d: cu[0] is -1");
  EXPECT_EQ(message({7}), "");
}

}  // namespace
}  // namespace monograph
