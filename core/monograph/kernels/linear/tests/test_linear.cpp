// Walks the variant list against a product in double; the bits must not depend on batch or threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/kernels/linear/blocking.h"
#include "monograph/kernels/linear/linear.h"

namespace monograph {
namespace {

using Bytes = std::vector<std::uint8_t>;

void append(Bytes& to, float x) {
  const auto bytes = std::bit_cast<std::array<std::uint8_t, 4>>(x);
  to.insert(to.end(), bytes.begin(), bytes.end());
}

void store(DType dtype, double x, std::uint8_t* out) {
  with_type(dtype, [&]<class T>() {
    const T element = from_float<T>(static_cast<float>(x));
    std::memcpy(out, &element, sizeof element);
  });
}

double load(DType dtype, const std::uint8_t* in) {
  return with_type(dtype, [&]<class T>() {
    T element;
    std::memcpy(&element, in, sizeof element);
    return static_cast<double>(to_float(element));
  });
}

// A matrix that owns its elements; `gap` elements stand behind each row and must stay as they are.
struct Owned {
  DType dtype;
  std::size_t rows, cols, stride;
  Bytes bytes;

  Owned(DType t, std::size_t r, std::size_t c, std::size_t gap = 0)
      : dtype(t), rows(r), cols(c), stride(c + gap), bytes(r * stride * size_bytes(t), 0xab) {}
  std::uint8_t* at(std::size_t r, std::size_t c) {
    return bytes.data() + (r * stride + c) * size_bytes(dtype);
  }
  double operator()(std::size_t r, std::size_t c) const {
    return load(dtype, bytes.data() + (r * stride + c) * size_bytes(dtype));
  }
  Matrix view() const { return {bytes.data(), rows, cols, stride}; }
  MutableMatrix out() { return {bytes.data(), rows, cols, stride}; }
};

Owned random_matrix(DType dtype, std::size_t rows, std::size_t cols, unsigned seed,
                    std::size_t gap = 0) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Owned m(dtype, rows, cols, gap);
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t c = 0; c < cols; ++c) store(dtype, normal(random), m.at(r, c));
  return m;
}

constexpr double kNf4[16] = {-1.0,
                             -0.6961928009986877,
                             -0.5250730514526367,
                             -0.39491748809814453,
                             -0.28444138169288635,
                             -0.18477343022823334,
                             -0.09105003625154495,
                             0.0,
                             0.07958029955625534,
                             0.16093020141124725,
                             0.24611230194568634,
                             0.33791524171829224,
                             0.44070982933044434,
                             0.5626170039176941,
                             0.7229568362236023,
                             1.0};
constexpr double kFp4Twelfths[16] = {0, .0625,  8,  12,  4,  6,  2,  3,
                                     0, -.0625, -8, -12, -4, -6, -2, -3};

struct Weight {
  Bytes values, scales, groups, map;
  std::vector<float> elements;  // dequantised
  LinearWeight view;
  std::vector<double> rounded_to(DType dtype) const {
    std::vector<double> rounded;
    for (const float e : elements) {
      std::uint8_t bytes[4];
      store(dtype, e, bytes);
      rounded.push_back(load(dtype, bytes));
    }
    return rounded;
  }
};

Weight random_weight(Format format, std::size_t rows, std::size_t cols, std::size_t block,
                     bool nested, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(0.01f, 0.1f);
  Weight w;
  const std::size_t n = rows * cols;
  w.view.packed = {format, rows, cols, block, nullptr, {}};
  if (format == Format::kPlain) {
    w.view.dtype = seed % 2 == 0 ? DType::kBFloat16 : DType::kFloat32;
    for (std::size_t i = 0; i < n; ++i) {
      std::uint8_t bytes[4];
      store(w.view.dtype, uniform(random) - 0.05, bytes);
      w.values.insert(w.values.end(), bytes, bytes + size_bytes(w.view.dtype));
      w.elements.push_back(static_cast<float>(load(w.view.dtype, bytes)));
    }
  } else {
    std::vector<float> scale, map, group;
    for (int i = 0; i < 256; ++i) map.push_back(static_cast<float>(i - 128) / 128);
    for (std::size_t i = 0; i < ceil_div(n, block); ++i) {
      if (i % 256 == 0) group.push_back(uniform(random));
      const std::uint8_t code = static_cast<std::uint8_t>(random());
      const float product = map[code] * group.back();
      scale.push_back(nested ? product + 0.05f : uniform(random));
      if (nested)
        w.scales.push_back(code);
      else
        append(w.scales, scale.back());
    }
    w.values.resize(ceil_div(n, 2));
    for (auto& v : w.values) v = static_cast<std::uint8_t>(random());
    for (std::size_t i = 0; i < n; ++i) {
      const unsigned code = i % 2 == 0 ? w.values[i / 2] >> 4 : w.values[i / 2] & 15u;
      const double value = format == Format::kNf4 ? kNf4[code] : kFp4Twelfths[code] / 12;
      w.elements.push_back(static_cast<float>(value) * scale[i / block]);
    }
    for (const float g : group) append(w.groups, g);
    for (const float m : map) append(w.map, m);
    w.view.packed.scales = {w.scales.data(), nested ? w.groups.data() : nullptr, w.map.data(),
                            0.05f};
  }
  w.view.packed.values = w.values.data();
  return w;
}

// |result - exact| for a sum of `count` products whose magnitudes sum to `magnitude`.
double tolerance(DType dtype, double exact, double magnitude, std::size_t count) {
  const double round = dtype == DType::kFloat32   ? 0x1p-24
                       : dtype == DType::kFloat16 ? 0x1p-11
                                                  : 0x1p-8;
  const double sums = 0x1p-24 * (4 + std::sqrt(static_cast<double>(count))) * magnitude;
  return 1.01 * (round * std::abs(exact) + sums) + (dtype == DType::kFloat16 ? 0x1p-24 : 0x1p-126);
}

// y or dx against gain * the sum over terms of left * weight (transposed forward) + bias.
void expect_close(DType dtype, Pass pass, const std::vector<const Owned*>& lefts,
                  const std::vector<const Weight*>& weights, const Owned* bias, const Owned& out,
                  const std::vector<float>& gain = {}) {
  std::vector<std::vector<double>> rounded;
  for (const Weight* w : weights) rounded.push_back(w->rounded_to(dtype));
  for (std::size_t m = 0; m < out.rows; ++m)
    for (std::size_t p = 0; p < out.cols; ++p) {
      double exact = bias == nullptr ? 0 : (*bias)(0, p), magnitude = std::abs(exact);
      std::size_t count = 1;
      for (std::size_t t = 0; t < lefts.size(); ++t)
        for (std::size_t r = 0; r < lefts[t]->cols; ++r, ++count) {
          const std::size_t cols = weights[t]->view.packed.cols;
          const std::size_t i = pass == Pass::kForward ? p * cols + r : r * cols + p;
          const double factor = gain.empty() ? 1 : gain[p];
          const double product = factor * (*lefts[t])(m, r) * rounded[t][i];
          exact += product;
          magnitude += std::abs(product);
        }
      ASSERT_NEAR(out(m, p), exact, tolerance(dtype, exact, magnitude, count))
          << "row " << m << " column " << p << " of " << out.rows << " x " << out.cols;
    }
}

// body(kernels, dtype) for every variant this CPU runs under the cap; says which it skips.
template <class Body>
void for_each_variant(Pass pass, Body body) {
  for (const LinearVariant& variant : linear_variants()) {
    if (variant.pass != pass) continue;
    if (variant.isa > best_isa()) {
      std::printf("[  skipped ] %s\n", name_of(variant.isa));
      continue;
    }
    SCOPED_TRACE(std::string(name_of(variant.isa)) + " " + name_of(variant.dtype));
    body(*variant.run, variant.dtype);
  }
}

struct Shape {
  std::size_t m, n, k, block;
};
constexpr Shape kShapes[] = {
    {1, 64, 64, 64},      // one token, one unit
    {2, 130, 128, 64},    // a second panel of two entries
    {7, 1, 77, 32},       // one output; odd rows start in the middle of a byte
    {17, 33, 1, 32},      // one column
    {16, 96, 96, 32},     // blocks of 32
    {33, 70, 31, 128},    // blocks straddle four rows
    {64, 48, 544, 4096},  // a chunk and a step; one block for many rows
    {3, 20, 4304, 64},    // SigLIP's width: rows are not whole blocks
    {50, 300, 160, 64},   // dx: an odd step of rows; columns a multiple of 32, not of 64
    {5, 1030, 64, 64},    // dx: three chunks, the last of six rows
    {1, 2, 5000, 256},    // ten chunks forward
    {9, 150, 4480, 64},   // few rows in pieces: the last of each kind is not whole
};

TEST(Linear, WhatAVariantMayLeaveOutIsLeftOutInPairs) {
  for (const Pass pass : {Pass::kForward, Pass::kDx})
    for_each_variant(pass, [](const LinearKernels& kernels, DType) {
      EXPECT_EQ(kernels.enter == nullptr, kernels.leave == nullptr);
      EXPECT_EQ(kernels.few == nullptr, kernels.few_rows == 0);
    });
}

TEST(Linear, EveryVariantMatchesTheReference) {
  for_each_variant(Pass::kForward, [](const LinearKernels& kernels, DType dtype) {
    unsigned seed = 0;
    for (const Shape& s : kShapes)
      for (const Format format : {Format::kNf4, Format::kFp4, Format::kPlain}) {
        const Weight w = random_weight(format, s.n, s.k, s.block, seed % 2 == 0, seed);
        ++seed;
        const Owned x = random_matrix(dtype, s.m, s.k, seed, seed % 3);
        const Owned bias = random_matrix(dtype, 1, s.n, seed + 1);
        Owned y(dtype, s.m, s.n, 1);
        const LinearOutput output = {w.view, {}, bias.bytes.data(), y.out()};
        linear_with(kernels, dtype, x.view(), {&output, 1}, serial_for);
        expect_close(dtype, Pass::kForward, {&x}, {&w}, &bias, y);
      }
  });
}

TEST(Linear, AGainMeetsTheSumsBeforeTheyAreRounded) {
  for_each_variant(Pass::kForward, [](const LinearKernels& kernels, DType dtype) {
    unsigned seed = 0;
    for (const Shape& s : kShapes) {
      const Weight w = random_weight(Format::kNf4, s.n, s.k, s.block, seed % 2 == 0, seed);
      ++seed;
      const Weight b = random_weight(Format::kPlain, s.n, 4, 0, false, seed);
      const Owned x = random_matrix(dtype, s.m, s.k, seed, seed % 3);
      const Owned u = random_matrix(dtype, s.m, 4, seed + 1);
      const Owned bias = random_matrix(dtype, 1, s.n, seed + 2);
      std::vector<float> gain(s.n);
      for (std::size_t i = 0; i < s.n; ++i) gain[i] = 1.0f + 0.001f * static_cast<float>(i % 7);
      Owned y(dtype, s.m, s.n, 1);
      const LinearTerm low_rank = {u.view(), b.view};
      const bool with_bias = seed % 2 == 0;
      const LinearOutput output = {
          w.view, {&low_rank, 1}, with_bias ? bias.bytes.data() : nullptr, y.out(), gain.data()};
      linear_with(kernels, dtype, x.view(), {&output, 1}, serial_for);
      expect_close(dtype, Pass::kForward, {&x, &u}, {&w, &b}, with_bias ? &bias : nullptr, y, gain);
    }
  });
}

TEST(LinearDx, EveryVariantMatchesTheReference) {
  for_each_variant(Pass::kDx, [](const LinearKernels& kernels, DType dtype) {
    unsigned seed = 0;
    for (const Shape& s : kShapes)
      for (const Format format : {Format::kNf4, Format::kFp4, Format::kPlain}) {
        const Weight w = random_weight(format, s.n, s.k, s.block, seed % 2 == 0, seed);
        ++seed;
        const Owned dy = random_matrix(dtype, s.m, s.n, seed, seed % 3);
        Owned dx(dtype, s.m, s.k, 1);
        const LinearTerm term = {dy.view(), w.view};
        linear_dx_with(kernels, dtype, {&term, 1}, dx.out(), serial_for);
        expect_close(dtype, Pass::kDx, {&dy}, {&w}, nullptr, dx);
      }
  });
}

TEST(Linear, LowRankTermsContinueTheSum) {
  for_each_variant(Pass::kForward, [](const LinearKernels& kernels, DType dtype) {
    const Weight w = random_weight(Format::kNf4, 70, 96, 32, true, 1);
    const Weight b = random_weight(Format::kPlain, 70, 16, 1, false, 2);
    const Weight b2 = random_weight(Format::kPlain, 70, 40, 1, false, 3);
    const Owned x = random_matrix(dtype, 19, 96, 4), u = random_matrix(dtype, 19, 16, 5);
    const Owned u2 = random_matrix(dtype, 19, 40, 6);
    Owned y(dtype, 19, 70);
    const LinearTerm low_rank[] = {{u.view(), b.view}, {u2.view(), b2.view}};
    const LinearOutput output = {w.view, low_rank, nullptr, y.out()};
    linear_with(kernels, dtype, x.view(), {&output, 1}, serial_for);
    expect_close(dtype, Pass::kForward, {&x, &u, &u2}, {&w, &b, &b2}, nullptr, y);
  });
}

TEST(LinearDx, SeveralTermsAreOneSum) {
  for_each_variant(Pass::kDx, [](const LinearKernels& kernels, DType dtype) {
    const Weight w = random_weight(Format::kNf4, 96, 200, 64, true, 1);
    const Weight a = random_weight(Format::kPlain, 9, 200, 1, false, 2);
    const Weight w2 = random_weight(Format::kFp4, 33, 200, 64, false, 3);
    const Owned dy = random_matrix(dtype, 19, 96, 4), du = random_matrix(dtype, 19, 9, 5);
    const Owned dy2 = random_matrix(dtype, 19, 33, 6);
    Owned dx(dtype, 19, 200);
    const LinearTerm terms[] = {{dy.view(), w.view}, {du.view(), a.view}, {dy2.view(), w2.view}};
    linear_dx_with(kernels, dtype, terms, dx.out(), serial_for);
    expect_close(dtype, Pass::kDx, {&dy, &du, &dy2}, {&w, &a, &w2}, nullptr, dx);
  });
}

// Rows [0, m) of `x` alone.
Owned first_rows(const Owned& x, std::size_t m) {
  Owned head = x;
  head.rows = m;
  head.bytes.resize(m * x.stride * size_bytes(x.dtype));
  return head;
}

constexpr std::size_t kBatches[] = {1, 2, 7, 16, 17, 64, 513};

TEST(Linear, ARowHasTheSameBitsInEveryBatch) {
  for_each_variant(Pass::kForward, [](const LinearKernels& kernels, DType dtype) {
    // More than a chunk; aligned, so that panels are decoded ahead, and not; more than any chunk.
    for (const std::size_t k : {576u, 588u, 2368u}) {
      const Weight w = random_weight(Format::kNf4, 150, k, 64, true, 1);
      const Weight b = random_weight(Format::kPlain, 150, 8, 1, false, 2);
      const std::size_t most = k > 1000 ? 70 : 513;
      const Owned x = random_matrix(dtype, most, k, 3), u = random_matrix(dtype, most, 8, 4);
      Bytes whole;
      for (const std::size_t m :
           {most, kBatches[0], kBatches[1], kBatches[2], kBatches[3], kBatches[4], kBatches[5]}) {
        const Owned head = first_rows(x, m), u_head = first_rows(u, m);
        Owned y(dtype, m, 150);
        const LinearTerm low_rank = {u_head.view(), b.view};
        const LinearOutput output = {w.view, {&low_rank, 1}, nullptr, y.out()};
        linear_with(kernels, dtype, head.view(), {&output, 1}, serial_for);
        if (m == most) whole = y.bytes;
        ASSERT_EQ(std::memcmp(whole.data(), y.bytes.data(), y.bytes.size()), 0) << m << " rows";
      }
    }
  });
}

TEST(LinearDx, ARowHasTheSameBitsInEveryBatch) {
  for_each_variant(Pass::kDx, [](const LinearKernels& kernels, DType dtype) {
    for (const std::size_t k : {192u, 200u}) {
      const Weight w = random_weight(Format::kFp4, 608, k, 64, true, 1);
      const Owned dy = random_matrix(dtype, 513, 608, 3);
      Bytes whole;
      for (const std::size_t m : {std::size_t{513}, kBatches[0], kBatches[1], kBatches[2],
                                  kBatches[3], kBatches[4], kBatches[5]}) {
        const Owned head = first_rows(dy, m);
        Owned dx(dtype, m, k);
        const LinearTerm term = {head.view(), w.view};
        linear_dx_with(kernels, dtype, {&term, 1}, dx.out(), serial_for);
        if (m == 513) whole = dx.bytes;
        ASSERT_EQ(std::memcmp(whole.data(), dx.bytes.data(), dx.bytes.size()), 0) << m << " rows";
      }
    }
  });
}

TEST(Linear, TheBitsDoNotDependOnThreads) {
  for_each_variant(Pass::kForward, [](const LinearKernels& kernels, DType dtype) {
    for (const std::size_t n : {30u, 300u}) {  // one panel, whose rows are cut, and several
      const Weight w = random_weight(Format::kNf4, n, 640, 64, true, 1);
      const Owned x = random_matrix(dtype, 100, 640, 3);
      Bytes alone;
      for (const int threads : {1, 2, 4}) {
        ThreadPool pool(threads);
        Owned y(dtype, 100, n);
        const LinearOutput output = {w.view, {}, nullptr, y.out()};
        const auto parallel_for = [&](std::size_t count, std::size_t grain, ParallelBody body) {
          pool.parallel_for(count, grain, body);
        };
        linear_with(kernels, dtype, x.view(), {&output, 1}, parallel_for);
        if (threads == 1) alone = y.bytes;
        ASSERT_EQ(alone, y.bytes) << threads << " threads";
      }
    }
  });
}

TEST(LinearDx, TheBitsDoNotDependOnThreads) {
  for_each_variant(Pass::kDx, [](const LinearKernels& kernels, DType dtype) {
    for (const std::size_t k : {64u, 320u}) {
      const Weight w = random_weight(Format::kNf4, 600, k, 64, false, 1);
      const Owned dy = random_matrix(dtype, 100, 600, 3);
      Bytes alone;
      for (const int threads : {1, 2, 4}) {
        ThreadPool pool(threads);
        Owned dx(dtype, 100, k);
        const LinearTerm term = {dy.view(), w.view};
        const auto parallel_for = [&](std::size_t count, std::size_t grain, ParallelBody body) {
          pool.parallel_for(count, grain, body);
        };
        linear_dx_with(kernels, dtype, {&term, 1}, dx.out(), parallel_for);
        if (threads == 1) alone = dx.bytes;
        ASSERT_EQ(alone, dx.bytes) << threads << " threads";
      }
    }
  });
}

TEST(Linear, WeightsThatShareXGiveWhatTheyGiveAlone) {
  for_each_variant(Pass::kForward, [](const LinearKernels& kernels, DType dtype) {
    const Owned x = random_matrix(dtype, 40, 256, 9), u = random_matrix(dtype, 40, 8, 8);
    const Weight b = random_weight(Format::kPlain, 64, 8, 1, false, 7);
    std::vector<Weight> weights;
    std::vector<Owned> together, alone;
    for (unsigned i = 0; i < 3; ++i) {
      weights.push_back(random_weight(Format::kNf4, 64, 256, 64, i != 0, i));
      together.emplace_back(dtype, 40, 64);
      alone.emplace_back(dtype, 40, 64);
    }
    const LinearTerm low_rank = {u.view(), b.view};
    std::vector<LinearOutput> outputs;
    for (unsigned i = 0; i < 3; ++i) {
      LinearOutput output = {weights[i].view, {}, nullptr, together[i].out()};
      if (i != 1) output.low_rank = {&low_rank, 1};
      outputs.push_back(output);
      output.y = alone[i].out();
      linear_with(kernels, dtype, x.view(), {&output, 1}, serial_for);
    }
    linear_with(kernels, dtype, x.view(), outputs, serial_for);
    for (unsigned i = 0; i < 3; ++i) EXPECT_EQ(together[i].bytes, alone[i].bytes) << "output " << i;
  });
}

TEST(Linear, NothingToDoAndNothingToSum) {
  for_each_variant(Pass::kForward, [](const LinearKernels& kernels, DType dtype) {
    const Weight w = random_weight(Format::kNf4, 8, 64, 64, true, 1);
    const Weight narrow = random_weight(Format::kPlain, 8, 0, 1, false, 2);
    const Owned none(dtype, 0, 64), empty(dtype, 3, 0), bias = random_matrix(dtype, 1, 8, 3);
    Owned y(dtype, 3, 8);
    const LinearOutput no_rows = {w.view, {}, nullptr, {y.bytes.data(), 0, 8, 8}};
    linear_with(kernels, dtype, none.view(), {&no_rows, 1}, serial_for);
    const LinearOutput no_sum = {narrow.view, {}, bias.bytes.data(), y.out()};
    linear_with(kernels, dtype, empty.view(), {&no_sum, 1}, serial_for);
    for (std::size_t r = 0; r < 3; ++r)
      for (std::size_t c = 0; c < 8; ++c) EXPECT_EQ(y(r, c), bias(0, c));
  });
}

// With many rows a plain bf16 weight of whole groups is decoded between tile steps, with few
// before.
TEST(Linear, PlainWeightsGiveAFewRowsTheBitsOfMany) {
  for (const Pass pass : {Pass::kForward, Pass::kDx})
    for_each_variant(pass, [&](const LinearKernels& kernels, DType dtype) {
      for (const auto& [n, k] : {std::pair{300, 640}, {1090, 128}, {130, 1152}}) {
        const Weight w = random_weight(Format::kPlain, static_cast<std::size_t>(n),
                                       static_cast<std::size_t>(k), 1, false, /*bf16=*/2);
        const std::size_t in = pass == Pass::kForward ? w.view.packed.cols : w.view.packed.rows;
        const std::size_t out = pass == Pass::kForward ? w.view.packed.rows : w.view.packed.cols;
        const Owned left = random_matrix(dtype, 270, in, 5);
        const auto product = [&](std::size_t rows) {
          Owned result(dtype, rows, out);
          const Matrix some = {left.bytes.data(), rows, in, in};
          const LinearOutput output = {w.view, {}, nullptr, result.out()};
          const LinearTerm term = {some, w.view};
          if (pass == Pass::kForward)
            linear_with(kernels, dtype, some, {&output, 1}, serial_for);
          else
            linear_dx_with(kernels, dtype, {&term, 1}, result.out(), serial_for);
          return result;
        };
        const Owned many = product(270);
        for (const std::size_t rows : {1, 17, 200}) {
          const Owned few = product(rows);
          EXPECT_TRUE(std::equal(few.bytes.begin(), few.bytes.end(), many.bytes.begin())) << rows;
          if (rows == 1) expect_close(dtype, pass, {&left}, {&w}, nullptr, few);
        }
      }
    });
}

TEST(Linear, ElementsBetweenRowsAreLeftAlone) {
  for_each_variant(Pass::kForward, [](const LinearKernels& kernels, DType dtype) {
    const Weight w = random_weight(Format::kNf4, 40, 64, 64, true, 1);
    const Owned x = random_matrix(dtype, 5, 64, 3);
    Owned y(dtype, 5, 40, 7);
    const LinearOutput output = {w.view, {}, nullptr, y.out()};
    linear_with(kernels, dtype, x.view(), {&output, 1}, serial_for);
    for (std::size_t r = 0; r < 5; ++r)
      for (std::size_t i = 0; i < 7 * size_bytes(dtype); ++i) EXPECT_EQ(y.at(r, 40)[i], 0xab);
  });
}

// The limits that linear.h promises, for every variant, any number of rows and any cache.
TEST(Blocking, ScratchIsBounded) {
  for (const Pass pass : {Pass::kForward, Pass::kDx})
    for_each_variant(pass, [](const LinearKernels& k, DType) {
      for (const std::size_t cache : {256u << 10, 1u << 20, 2u << 20, 16u << 20})
        for (const std::size_t rows : {0u, 1u, 31u, 512u, 513u, 100000u}) {
          const Blocking b = choose_blocking(k, rows, cache);
          EXPECT_LE(b.left_bytes + b.sums_bytes, std::size_t{4} << 20);
          EXPECT_LE(b.rows * k.packed_row_bytes(k.chunk), b.left_bytes);
          EXPECT_GE(b.sums_bytes, b.rows * k.panel * 4);
          const std::size_t panel = k.steps(k.chunk) * k.panel_step_bytes + 4096;
          EXPECT_LE(2 * panel + b.rows * k.panel * 4, std::size_t{2} << 20);
        }
    });
}

}  // namespace
}  // namespace monograph
