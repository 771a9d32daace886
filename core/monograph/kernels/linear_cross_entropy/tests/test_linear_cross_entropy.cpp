// Rows of every variant against double; the drivers against double and against themselves.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/kernels/linear_cross_entropy/linear_cross_entropy.h"

namespace monograph {
namespace {

constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Bytes = std::vector<std::uint8_t>;

Bytes stored(DType dtype, const std::vector<double>& values) {
  Bytes bytes(values.size() * size_bytes(dtype));
  with_type(dtype, [&]<class T>() {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const T element = from_float<T>(static_cast<float>(values[i]));
      std::memcpy(bytes.data() + i * sizeof(T), &element, sizeof(T));
    }
  });
  return bytes;
}

std::vector<double> loaded(DType dtype, const Bytes& bytes) {
  std::vector<double> values(bytes.size() / size_bytes(dtype));
  with_type(dtype, [&]<class T>() {
    for (std::size_t i = 0; i < values.size(); ++i) {
      T element;
      std::memcpy(&element, bytes.data() + i * sizeof(T), sizeof(T));
      values[i] = static_cast<double>(to_float(element));
    }
  });
  return values;
}

std::vector<double> random_values(std::size_t count, double spread, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, spread);
  std::vector<double> values(count);
  for (double& value : values) value = normal(random);
  return values;
}

double half_ulp(DType dtype) {
  return dtype == DType::kFloat32 ? 0x1p-24 : dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
}

// What a row gives, by the definition.
struct Reference {
  double loss, lse;
  std::vector<double> gradient;
};
Reference reference_of(const std::vector<double>& logits, std::size_t label, LogitsMap map) {
  const double scale = map.scale, cap = map.softcap;
  std::vector<double> z, slope;
  for (const double logit : logits) {
    const double t = cap > 0 ? std::tanh(scale * logit / cap) : 0;
    z.push_back(cap > 0 ? cap * t : scale * logit);
    slope.push_back(cap > 0 ? scale * (1 - t * t) : scale);
  }
  double sum = 0;
  for (const double value : z) sum += std::exp(value - z[label]);
  Reference r = {std::log(sum), std::log(sum) + z[label], {}};
  for (std::size_t i = 0; i < z.size(); ++i)
    r.gradient.push_back((std::exp(z[i] - r.lse) - (i == label)) * slope[i]);
  return r;
}

template <class Body>
void for_each_kernel(Body body) {
  for (const CrossEntropyVariant& variant : cross_entropy_variants()) {
    if (variant.isa > best_isa()) continue;
    SCOPED_TRACE(std::string(name_of(variant.isa)) + " " + name_of(variant.dtype));
    body(*variant.run, variant.dtype);
  }
}

std::vector<std::size_t> sizes() {
  std::vector<std::size_t> counts;
  for (std::size_t n = 1; n <= 40; ++n) counts.push_back(n);
  for (const std::size_t n : {1023, 1024, 1025, 1040, 2049, 5001}) counts.push_back(n);
  return counts;
}

TEST(CrossEntropyRow, LossAndGradientOfEverySizeAgainstDouble) {
  const LogitsMap maps[] = {{1, 0}, {0.125f, 0}, {1, 3}, {2, 5}};
  for_each_kernel([&](const CrossEntropyKernels& kernels, DType dtype) {
    for (const std::size_t count : sizes()) {
      const std::size_t label = count * 7 / 11;
      const LogitsMap map = maps[count % 4];
      Bytes bytes = stored(dtype, random_values(count, 4, static_cast<unsigned>(count)));
      const Reference want = reference_of(loaded(dtype, bytes), label, map);
      const LogitsRow row = {bytes.data(), count, label, map};
      const RowSums sums = kernels.sums(row);
      const double log_sum = std::log(sums.sum);
      // exp 2e-7 and its argument, up to 30 away, 64 terms in a chain: below 2^-18 of the sum.
      // tanh has 3e-7 of the cap.
      const double error = 0x1p-18 + 1e-6 * static_cast<double>(map.softcap);
      EXPECT_NEAR(log_sum + (sums.peak - sums.label), want.loss, error) << count;
      EXPECT_NEAR(log_sum + sums.peak, want.lse, error + 0x1p-23 * std::abs(want.lse)) << count;
      kernels.gradient(row, sums.peak, static_cast<float>(1 / sums.sum), 1.f);
      const std::vector<double> got = loaded(dtype, bytes);
      const double smallest = dtype == DType::kFloat16 ? 0x1p-25 : 0;
      for (std::size_t i = 0; i < count; ++i)
        EXPECT_NEAR(got[i], want.gradient[i],
                    half_ulp(dtype) * std::abs(want.gradient[i]) + 2 * error * map.scale + smallest)
            << count << " at " << i;
    }
  });
}

TEST(CrossEntropyRow, StatisticsAndTheGradientOfTheEntropyAgainstDouble) {
  const LogitsMap maps[] = {{1, 0}, {0.125f, 0}, {1, 3}, {2, 5}};
  for_each_kernel([&](const CrossEntropyKernels& kernels, DType dtype) {
    for (const std::size_t count : sizes()) {
      const std::size_t label = count * 7 / 11;
      const LogitsMap map = maps[count % 4];
      Bytes bytes = stored(dtype, random_values(count, 4, static_cast<unsigned>(count)));
      const std::vector<double> logits = loaded(dtype, bytes);
      const double scale = map.scale, cap = map.softcap;
      std::vector<double> z;
      for (const double x : logits)
        z.push_back(cap > 0 ? cap * std::tanh(scale * x / cap) : scale * x);
      const double lse = reference_of(logits, label, map).lse;
      double entropy = 0, squares = 0, total = 0, before = -kInfinity;
      for (std::size_t i = 0; i < count; ++i) {
        entropy -= std::exp(z[i] - lse) * (z[i] - lse);
        squares += std::exp(2 * (z[i] - lse));
        total += z[i];
        if (i < label) before = std::max(before, z[i]);
      }
      const LogitsRow row = {bytes.data(), count, label, map};
      const RowSums sums = kernels.sums(row);
      const RowStatistics got = kernels.statistics(row, sums.peak);
      // As in the test above; the entropy weighs each term with a logarithm of at most 30.
      const double error = 0x1p-18 + 1e-6 * cap;
      EXPECT_NEAR(std::log(sums.sum) - got.weighted / sums.sum, entropy, 32 * error) << count;
      EXPECT_NEAR(std::log(got.squares) - 2 * std::log(sums.sum), std::log(squares), 4 * error);
      EXPECT_NEAR(got.total, total, error * static_cast<double>(count) * 8) << count;
      if (label == 0)
        EXPECT_EQ(got.before, -kInfinity);
      else
        EXPECT_NEAR(got.before, before, error + 0x1p-22 * std::abs(before)) << count;
      kernels.entropy_gradient(row, static_cast<float>(lse), static_cast<float>(entropy), 0.5f);
      const std::vector<double> gradient = loaded(dtype, bytes);
      for (std::size_t i = 0; i < count; ++i) {
        const double slope = cap > 0 ? scale * (1 - z[i] * z[i] / cap / cap) : scale;
        const double want = -0.5 * std::exp(z[i] - lse) * (z[i] - lse + entropy) * slope;
        EXPECT_NEAR(gradient[i], want,
                    half_ulp(dtype) * std::abs(want) + 32 * error * scale + 0x1p-24)
            << count << " at " << i;
      }
    }
  });
}

TEST(CrossEntropyRow, ASliceWithoutTheLabelAndAFactor) {
  for_each_kernel([&](const CrossEntropyKernels& kernels, DType dtype) {
    Bytes bytes = stored(dtype, random_values(37, 2, 5));
    const std::vector<double> logits = loaded(dtype, bytes);
    kernels.gradient({bytes.data(), 37, kNoLabel, {}}, 3.f, 1.f, 0.25f);
    const std::vector<double> got = loaded(dtype, bytes);
    for (std::size_t i = 0; i < 37; ++i)
      EXPECT_NEAR(got[i], 0.25 * std::exp(logits[i] - 3),
                  (half_ulp(dtype) + 1e-6) * std::exp(logits[i] - 3) + 0x1p-24);
  });
}

// What torch's cross_entropy gives for the same row.
TEST(CrossEntropyRow, NanAndInfinities) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  struct Case {
    double odd;
    std::size_t place, label;
    bool loss_is_nan, loss_is_infinite;
  };
  for_each_kernel([&](const CrossEntropyKernels& kernels, DType dtype) {
    for (const std::size_t count : {5, 16, 33, 1100}) {
      for (const Case& c : {Case{nan, 1, 3, true, false},
                            {nan, count - 1, 3, true, false},
                            {kInfinity, 2, 3, true, false},
                            {kInfinity, 3, 3, true, false},
                            {-kInfinity, 0, 3, false, false},
                            {-kInfinity, 3, 3, false, true}}) {
        std::vector<double> logits = random_values(count, 1, 9);
        logits[c.place] = c.odd;
        Bytes bytes = stored(dtype, logits);
        const LogitsRow row = {bytes.data(), count, c.label, {}};
        const RowSums sums = kernels.sums(row);
        const double loss = std::log(sums.sum) + (sums.peak - sums.label);
        EXPECT_EQ(std::isnan(loss), c.loss_is_nan) << c.odd << " at " << c.place;
        EXPECT_EQ(std::isinf(loss), c.loss_is_infinite) << c.odd << " at " << c.place;
        kernels.gradient(row, sums.peak, static_cast<float>(1 / sums.sum), 1.f);
        const std::vector<double> got = loaded(dtype, bytes);
        EXPECT_EQ(std::isnan(got[4]), c.loss_is_nan);
        if (!c.loss_is_nan) EXPECT_EQ(got[c.place], c.place == c.label ? -1 : 0);
      }
    }
  });
}

// A small head and its tokens; every third label does not count.
struct Head {
  DType dtype;
  std::size_t tokens, vocabulary, width;
  Bytes x, weight, bias;
  std::vector<std::int64_t> labels;
  LogitsMap map = {0.5f, 6};

  Head(DType type, std::size_t t, std::size_t v, std::size_t k)
      : dtype(type),
        tokens(t),
        vocabulary(v),
        width(k),
        x(stored(type, random_values(t * k, 1, 1))),
        weight(stored(type, random_values(v * k, 0.3, 2))),
        bias(stored(type, random_values(v, 1, 3))) {
    for (std::size_t i = 0; i < t; ++i)
      labels.push_back(i % 3 == 1 ? kIgnoredLabel : static_cast<std::int64_t>(i * 37 % v));
  }
  CrossEntropyProblem problem() const {
    CrossEntropyProblem p = {
        dtype, {x.data(), tokens, width, width}, {}, bias.data(), labels.data(), map};
    p.weight.dtype = dtype;
    p.weight.packed.rows = vocabulary;
    p.weight.packed.cols = width;
    p.weight.packed.values = weight.data();
    return p;
  }
};

struct Result {
  std::vector<float> loss, lse;
  Bytes dx;
};
Result run(const Head& head, ParallelFor parallel_for, std::size_t bytes, bool dx = true) {
  Result r = {std::vector<float>(head.tokens, -1), std::vector<float>(head.tokens, -1),
              Bytes(dx ? head.x.size() : 0, 0xff)};
  linear_cross_entropy(
      head.problem(),
      {r.loss.data(), r.lse.data(),
       dx ? MutableMatrix{r.dx.data(), head.tokens, head.width, head.width} : MutableMatrix{}},
      parallel_for, bytes);
  return r;
}

TEST(LinearCrossEntropy, TheSameBitsForAnyChunksThreadsAndNeighbours) {
  for (const DType dtype : kTypes) {
    const Head head(dtype, 75, 131, 40);
    const Result want = run(head, serial_for, kLogitsBytes);
    ThreadPool pool(3);
    const auto threads = [&](std::size_t count, std::size_t grain, ParallelBody body) {
      pool.parallel_for(count, grain, body);
    };
    for (const std::size_t bytes : {1, 131 * 4 * 3, 131 * 2 * 33, 131 * 4 * 40}) {
      const Result got = run(head, threads, bytes);
      EXPECT_EQ(got.loss, want.loss) << bytes;
      EXPECT_EQ(got.lse, want.lse) << bytes;
      EXPECT_EQ(got.dx, want.dx) << bytes;
    }
    EXPECT_EQ(run(head, serial_for, kLogitsBytes, /*dx=*/false).loss, want.loss);
    Head without_gaps = head;
    for (std::size_t t = 0; t < head.tokens; ++t)
      if (head.labels[t] == kIgnoredLabel) without_gaps.labels[t] = 5;
    const Result all = run(without_gaps, serial_for, kLogitsBytes);
    for (std::size_t t = 0; t < head.tokens; ++t) {
      const bool ignored = head.labels[t] == kIgnoredLabel;
      EXPECT_EQ(want.loss[t], ignored ? 0 : all.loss[t]);
      const std::size_t row = head.width * size_bytes(dtype);
      const Bytes zeros(row, 0);
      EXPECT_EQ(std::memcmp(want.dx.data() + t * row,
                            ignored ? zeros.data() : all.dx.data() + t * row, row),
                0);
    }
  }
}

TEST(LinearCrossEntropy, LossAndEveryGradientAgainstDouble) {
  for (const DType dtype : kTypes) {
    const Head head(dtype, 41, 70, 24);
    const Result got = run(head, serial_for, 70 * 4 * 8);
    const std::vector<double> x = loaded(dtype, head.x), w = loaded(dtype, head.weight),
                              b = loaded(dtype, head.bias), dx = loaded(dtype, got.dx);
    std::vector<float> g(head.tokens);
    for (std::size_t t = 0; t < head.tokens; ++t) g[t] = 0.1f * static_cast<float>(t % 5 + 1);
    std::vector<double> want_dw(w.size()), want_db(b.size());
    const double tolerance = 8 * half_ulp(dtype) + 1e-5;
    for (std::size_t t = 0; t < head.tokens; ++t) {
      if (head.labels[t] == kIgnoredLabel) continue;
      std::vector<double> logits = b;
      for (std::size_t v = 0; v < head.vocabulary; ++v)
        for (std::size_t k = 0; k < head.width; ++k)
          logits[v] += x[t * head.width + k] * w[v * head.width + k];
      const Reference want =
          reference_of(logits, static_cast<std::size_t>(head.labels[t]), head.map);
      // Logits are below 8 and rounded once.
      EXPECT_NEAR(got.loss[t], want.loss, 8 * tolerance);
      for (std::size_t k = 0; k < head.width; ++k) {
        double sum = 0;
        for (std::size_t v = 0; v < head.vocabulary; ++v)
          sum += want.gradient[v] * w[v * head.width + k];
        EXPECT_NEAR(dx[t * head.width + k], sum, tolerance);
        for (std::size_t v = 0; v < head.vocabulary; ++v)
          want_dw[v * head.width + k] +=
              static_cast<double>(g[t]) * want.gradient[v] * x[t * head.width + k];
      }
      for (std::size_t v = 0; v < head.vocabulary; ++v)
        want_db[v] += static_cast<double>(g[t]) * want.gradient[v];
    }
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{28 * 4 * 70}, kLogitsBytes}) {
      Bytes dw(head.weight.size(), 0xff);
      std::vector<float> db(head.vocabulary);
      linear_cross_entropy_dw(head.problem(),
                              {got.lse.data(),
                               g.data(),
                               {dw.data(), head.vocabulary, head.width, head.width},
                               db.data()},
                              serial_for, bytes);
      const std::vector<double> got_dw = loaded(dtype, dw);
      for (std::size_t i = 0; i < got_dw.size(); ++i) EXPECT_NEAR(got_dw[i], want_dw[i], tolerance);
      for (std::size_t v = 0; v < db.size(); ++v) EXPECT_NEAR(db[v], want_db[v], tolerance);
    }
  }
}

TEST(LinearCrossEntropy, TheEntropysGradientHasTheSameBitsForAnyChunksAndSkipsZeros) {
  const Head head(DType::kBFloat16, 75, 131, 40);
  std::vector<float> loss(75), lse(75), entropy(75), squares(75), mean(75), g(75);
  const auto top = std::make_unique<bool[]>(75);
  const TokenStatistics statistics = {entropy.data(), squares.data(), mean.data(), top.get()};
  linear_cross_entropy(head.problem(), {loss.data(), lse.data(), {}, &statistics}, serial_for);
  for (std::size_t t = 0; t < 75; ++t) {
    EXPECT_EQ(head.labels[t] == kIgnoredLabel, entropy[t] == 0) << t;
    g[t] = t % 4 == 0 ? 0.f : 0.5f;
  }
  const auto dx_with = [&](std::size_t bytes) {
    Bytes dx(head.x.size(), 0xff);
    linear_entropy_dx(head.problem(),
                      {lse.data(), entropy.data(), g.data(), {dx.data(), 75, 40, 40}}, serial_for,
                      bytes);
    return dx;
  };
  const Bytes want = dx_with(kLogitsBytes);
  for (const std::size_t bytes : {1, 131 * 2 * 3, 131 * 2 * 40}) EXPECT_EQ(dx_with(bytes), want);
  for (std::size_t t = 0; t < 75; ++t) {
    const Bytes zeros(80, 0);
    const bool none = head.labels[t] == kIgnoredLabel || g[t] == 0;
    EXPECT_EQ(std::memcmp(want.data() + 80 * t, zeros.data(), 80) == 0, none) << t;
  }
}

TEST(LinearCrossEntropy, NoLabelAtAllAndNoTokens) {
  Head head(DType::kBFloat16, 9, 20, 8);
  for (std::int64_t& label : head.labels) label = kIgnoredLabel;
  const Result got = run(head, serial_for, kLogitsBytes);
  EXPECT_EQ(got.loss, std::vector<float>(9, 0));
  EXPECT_EQ(got.dx, Bytes(head.x.size(), 0));
  Bytes dw(head.weight.size(), 0xff);
  std::vector<float> db(20, 1);
  const std::vector<float> zeros(9, 0);
  linear_cross_entropy_dw(
      head.problem(), {zeros.data(), zeros.data(), {dw.data(), 20, 8, 8}, db.data()}, serial_for);
  EXPECT_EQ(dw, Bytes(dw.size(), 0));
  EXPECT_EQ(db, std::vector<float>(20, 0));
  EXPECT_TRUE(run(Head(DType::kFloat32, 0, 20, 8), serial_for, kLogitsBytes).loss.empty());
}

}  // namespace
}  // namespace monograph
