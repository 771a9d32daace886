// Every variant against attention written out in double, then the promises: a document's bits
// depend neither on its neighbours nor on threads, nothing leaks between documents, gaps are zero.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/float_types.h"
#include "kernels/varlen_attention/varlen_attention.h"

namespace monograph {
namespace {

struct Shape {
  std::vector<std::pair<int, int>> lengths;  // queries, keys of each document
  std::size_t heads = 2, kv_heads = 1, key_size = 16, value_size = 16;
  bool causal = true;
  int window = 0;
  float softcap = 0;
  bool sinks = false;
  float scale = 0;          // 0: 1 / sqrt(key_size)
  int gap = 0;              // rows before the first and after the last document
  int unused_keys = 0;      // rows after a document's keys that its key length leaves out
  std::size_t row_gap = 0;  // elements between heads that belong to nobody
};

// A [tokens, heads, size] tensor with NaN in whatever is not data.
struct Tensor {
  DType dtype;
  std::size_t tokens, heads, size, stride;
  std::vector<std::byte> bytes;

  Tensor(DType type, std::size_t t, std::size_t h, std::size_t s, std::size_t row_gap)
      : dtype(type),
        tokens(t),
        heads(h),
        size(s),
        stride(s + row_gap),
        bytes(t * h * stride * size_bytes(type)) {
    for (std::size_t i = 0; i < t * h * stride; ++i) put(i, std::nanf(""));
  }
  void put(std::size_t i, float x) {
    with_type(dtype, [&]<class T>() {
      const T value = from_float<T>(x);
      std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
    });
  }
  double get(std::size_t i) const {
    return with_type(dtype, [&]<class T>() -> double {
      T value;
      std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
      return to_float(value);
    });
  }
  std::size_t at(std::size_t t, std::size_t h, std::size_t d) const {
    return (t * heads + h) * stride + d;
  }
  double operator()(std::size_t t, std::size_t h, std::size_t d) const { return get(at(t, h, d)); }
  // Rows [begin, begin + count) of head h.
  std::vector<std::vector<double>> head(std::size_t begin, int count, std::size_t h) const {
    std::vector<std::vector<double>> out(count, std::vector<double>(size));
    for (int t = 0; t < count; ++t)
      for (std::size_t d = 0; d < size; ++d) out[t][d] = get(at(begin + t, h, d));
    return out;
  }
  void fill(std::size_t begin, std::size_t end, std::mt19937& rng) {
    std::normal_distribution<float> normal;
    for (std::size_t t = begin; t < end; ++t)
      for (std::size_t h = 0; h < heads; ++h)
        for (std::size_t d = 0; d < size; ++d) put(at(t, h, d), normal(rng));
  }
  // The bytes of rows [begin, begin + count), the gaps left out.
  std::vector<std::byte> rows(std::size_t begin, std::size_t count) const {
    std::vector<std::byte> out;
    const std::size_t width = size_bytes(dtype);
    for (std::size_t t = begin; t < begin + count; ++t)
      for (std::size_t h = 0; h < heads; ++h) {
        const std::byte* const row = bytes.data() + at(t, h, 0) * width;
        out.insert(out.end(), row, row + size * width);
      }
    return out;
  }
  void copy_rows(std::size_t to, const Tensor& from, std::size_t begin, std::size_t count) {
    const std::size_t row = heads * stride * size_bytes(dtype);
    std::copy_n(from.bytes.data() + begin * row, count * row, bytes.data() + to * row);
  }
  HeadsView view() const {
    return {bytes.data(), static_cast<std::ptrdiff_t>(heads * stride),
            static_cast<std::ptrdiff_t>(stride)};
  }
  MutableHeadsView mutable_view() {
    return {bytes.data(), static_cast<std::ptrdiff_t>(heads * stride),
            static_cast<std::ptrdiff_t>(stride)};
  }
};

std::size_t tokens_of(const Shape& s, bool keys) {
  std::size_t sum = 2 * static_cast<std::size_t>(s.gap);
  for (const auto& [q, k] : s.lengths)
    sum += static_cast<std::size_t>(keys ? k + s.unused_keys : q);
  return sum;
}

// Inputs, outputs and everything a job points to.
struct Case {
  Shape shape;
  std::vector<std::int32_t> query_offsets, key_offsets, key_lengths;
  std::vector<float> sinks, dsinks, lse;
  Tensor q, k, v, out, dout, dq, dk, dv;

  Case(const Shape& s, DType dtype, unsigned seed)
      : shape(s),
        q(dtype, tokens_of(s, false), s.heads, s.key_size, s.row_gap),
        k(dtype, tokens_of(s, true), s.kv_heads, s.key_size, s.row_gap),
        v(dtype, tokens_of(s, true), s.kv_heads, s.value_size, s.row_gap),
        out(dtype, q.tokens, s.heads, s.value_size, s.row_gap),
        dout(out),
        dq(q),
        dk(k),
        dv(v) {
    std::mt19937 rng(seed);
    std::int32_t qt = s.gap, kt = s.gap;
    for (const auto& [lq, lk] : s.lengths) {
      query_offsets.push_back(qt);
      key_offsets.push_back(kt);
      key_lengths.push_back(lk);
      q.fill(qt, qt + lq, rng);
      dout.fill(qt, qt + lq, rng);
      k.fill(kt, kt + lk, rng);
      v.fill(kt, kt + lk, rng);
      qt += lq;
      kt += lk + s.unused_keys;
    }
    query_offsets.push_back(qt);
    key_offsets.push_back(kt);
    lse.assign(s.heads * q.tokens, std::nanf(""));
    std::normal_distribution<float> normal;
    for (std::size_t h = 0; s.sinks && h < s.heads; ++h) sinks.push_back(2 * normal(rng));
    dsinks.assign(sinks.size(), std::nanf(""));
  }

  float scale() const {
    return shape.scale != 0 ? shape.scale : 1 / std::sqrt(static_cast<float>(shape.key_size));
  }
  AttentionProblem problem() const {
    return {q.dtype,
            q.tokens,
            k.tokens,
            shape.heads,
            shape.kv_heads,
            shape.key_size,
            shape.value_size,
            shape.causal,
            shape.window,
            scale(),
            shape.softcap,
            sinks.empty() ? nullptr : sinks.data(),
            {key_lengths.size(), query_offsets.data(), key_offsets.data(), key_lengths.data()}};
  }
  void run(const AttentionVariant& variant, ParallelFor parallel_for = serial_for,
           int threads = 1) {
    varlen_attention_with(variant,
                          {problem(), q.view(), k.view(), v.view(), out.mutable_view(), lse.data()},
                          parallel_for, threads);
    varlen_attention_backward_with(variant,
                                   {problem(), q.view(), k.view(), v.view(), out.view(),
                                    dout.view(), lse.data(), dq.mutable_view(), dk.mutable_view(),
                                    dv.mutable_view(), dsinks.empty() ? nullptr : dsinks.data()},
                                   parallel_for, threads);
  }
};

// Values in double and, beside each, the sum of the magnitudes it is made of: what rounding scales
// with.
struct Reference {
  std::vector<double> out, out_size, lse, dq, dq_size, dk, dk_size, dv, dv_size, dsinks,
      dsinks_size;
};

bool visible(const Shape& s, int i, int j, int lq, int lk) {
  const int p = i + lk - lq;
  if (s.causal && j > p) return false;
  return s.window == 0 || (p - j < s.window && j - p < s.window);
}

// One document and one head, in double.
struct Head {
  const Case& c;
  Reference& r;
  std::size_t h, hk, q0, k0;
  int lq, lk;
  std::vector<std::vector<double>> q, k, v, dout;

  Head(const Case& from, std::size_t document, std::size_t head, Reference& to)
      : c(from),
        r(to),
        h(head),
        hk(head / (from.shape.heads / from.shape.kv_heads)),
        q0(from.query_offsets[document]),
        k0(from.key_offsets[document]),
        lq(from.shape.lengths[document].first),
        lk(from.shape.lengths[document].second),
        q(from.q.head(q0, lq, h)),
        k(from.k.head(k0, lk, hk)),
        v(from.v.head(k0, lk, hk)),
        dout(from.dout.head(q0, lq, h)) {}

  void add_query(int i) {
    const Shape& s = c.shape;
    std::vector<double> p(lk), slope(lk, 1);
    double sum = c.sinks.empty() ? 0 : std::exp(static_cast<double>(c.sinks[h]));
    for (int j = 0; j < lk; ++j) {
      if (!visible(s, i, j, lq, lk)) continue;
      double x = 0;
      for (std::size_t d = 0; d < s.key_size; ++d) x += q[i][d] * k[j][d] * c.scale();
      if (s.softcap > 0) {
        const double t = std::tanh(x / s.softcap);
        x = s.softcap * t;
        slope[j] = 1 - t * t;
      }
      p[j] = std::exp(x);
      sum += p[j];
    }
    for (double& x : p) x = sum == 0 ? 0 : x / sum;
    r.lse[h * c.q.tokens + q0 + i] = std::log(sum);
    double delta = 0, delta_size = 0;
    for (std::size_t d = 0; d < s.value_size; ++d) {
      double o = 0, size = 0;
      for (int j = 0; j < lk; ++j) {
        o += p[j] * v[j][d];
        size += p[j] * std::abs(v[j][d]);
      }
      r.out[c.out.at(q0 + i, h, d)] = o;
      r.out_size[c.out.at(q0 + i, h, d)] = size;
      delta += o * dout[i][d];
      delta_size += size * std::abs(dout[i][d]);
    }
    if (!c.sinks.empty()) {
      r.dsinks[h] -= std::exp(c.sinks[h]) / sum * delta;
      r.dsinks_size[h] += std::exp(c.sinks[h]) / sum * delta_size;
    }
    for (int j = 0; j < lk; ++j)
      if (p[j] != 0) add_pair(i, j, p[j], slope[j], delta, delta_size);
  }

  void add_pair(int i, int j, double p, double slope, double delta, double delta_size) {
    double dp = 0, dp_size = 0;
    for (std::size_t d = 0; d < c.shape.value_size; ++d) {
      const std::size_t at = c.dv.at(k0 + j, hk, d);
      dp += dout[i][d] * v[j][d];
      dp_size += std::abs(dout[i][d] * v[j][d]);
      r.dv[at] += p * dout[i][d];
      r.dv_size[at] += p * std::abs(dout[i][d]);
    }
    const double ds = p * slope * (dp - delta) * c.scale();
    const double ds_size = p * (dp_size + delta_size) * c.scale();
    for (std::size_t d = 0; d < c.shape.key_size; ++d) {
      const std::size_t query = c.dq.at(q0 + i, h, d), key = c.dk.at(k0 + j, hk, d);
      r.dq[query] += ds * k[j][d];
      r.dq_size[query] += ds_size * std::abs(k[j][d]);
      r.dk[key] += ds * q[i][d];
      r.dk_size[key] += ds_size * std::abs(q[i][d]);
    }
  }
};

Reference reference(const Case& c) {
  Reference r;
  const auto zero = [](const Tensor& t) {
    return std::vector<double>(t.tokens * t.heads * t.stride);
  };
  r.out = r.out_size = zero(c.out);
  r.dq = r.dq_size = zero(c.dq);
  r.dk = r.dk_size = zero(c.dk);
  r.dv = r.dv_size = zero(c.dv);
  r.lse.resize(c.lse.size());
  r.dsinks.resize(c.sinks.size());
  r.dsinks_size.resize(c.sinks.size());
  for (std::size_t d = 0; d < c.shape.lengths.size(); ++d)
    for (std::size_t h = 0; h < c.shape.heads; ++h) {
      Head head(c, d, h, r);
      for (int i = 0; i < head.lq; ++i) head.add_query(i);
    }
  return r;
}

// A probability and a gradient of a score carry one rounding of the type each (on matrix units),
// the result another, `out` inside delta a third; fp32 has chains of some hundred terms instead.
double unit_of(DType dtype) {
  return dtype == DType::kBFloat16 ? 0x1p-8 : dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-17;
}

void expect_close(const Tensor& got, const std::vector<double>& want,
                  const std::vector<double>& size, double factor, const std::string& name) {
  for (std::size_t t = 0; t < got.tokens; ++t)
    for (std::size_t h = 0; h < got.heads; ++h)
      for (std::size_t d = 0; d < got.size; ++d) {
        const std::size_t i = got.at(t, h, d);
        const double bound = factor * unit_of(got.dtype) * size[i] + 1e-7;
        ASSERT_NEAR(got.get(i), want[i], bound) << name << " at " << t << "," << h << "," << d;
      }
}

void expect_reference(const Case& c, const Reference& r) {
  expect_close(c.out, r.out, r.out_size, 2, "out");
  expect_close(c.dv, r.dv, r.dv_size, 2, "dv");
  expect_close(c.dq, r.dq, r.dq_size, 4, "dq");
  expect_close(c.dk, r.dk, r.dk_size, 4, "dk");
  for (std::size_t i = 0; i < r.lse.size(); ++i) {
    if (std::isinf(r.lse[i])) {
      ASSERT_EQ(c.lse[i], r.lse[i]);
    } else {
      ASSERT_NEAR(c.lse[i], r.lse[i], 2e-5 * (1 + std::abs(r.lse[i]))) << "lse " << i;
    }
  }
  for (std::size_t h = 0; h < r.dsinks.size(); ++h)
    ASSERT_NEAR(c.dsinks[h], r.dsinks[h], 3 * unit_of(c.q.dtype) * r.dsinks_size[h] + 1e-7);
}

// Calls body(variant) for each variant the machine and the cap allow.
template <class Body>
void for_variants(const Body& body) {
  for (const AttentionVariant& v : varlen_attention_variants()) {
    if (v.isa > best_isa()) continue;
    SCOPED_TRACE(std::string(name_of(v.isa)) + " " + name_of(v.dtype));
    body(v);
    if (testing::Test::HasFatalFailure()) return;
  }
}

const Shape kShapes[] = {
    {.lengths = {{1, 1}}},                                     // the smallest
    {.lengths = {{0, 0}, {5, 5}, {0, 7}, {3, 0}}},             // empty, keys or queries only
    {.lengths = {{31, 31}, {32, 32}, {33, 33}}},               // around a strip
    {.lengths = {{129, 129}, {257, 257}}, .heads = 1},         // around a block
    {.lengths = {{48, 64}, {49, 65}, {96, 128}}},              // around the vector variants' blocks
    {.lengths = {{1, 300}, {4, 129}, {5, 40}, {2, 2}}},        // few queries, and one too many
    {.lengths = {{40, 9}}},                                    // queries that see no key
    {.lengths = {{40, 9}}, .sinks = true},                     // ... but a sink
    {.lengths = {{70, 70}}, .heads = 6, .kv_heads = 2},        // groups of three
    {.lengths = {{50, 50}}, .key_size = 8, .value_size = 40},  // below and between vectors
    {.lengths = {{50, 50}}, .key_size = 5, .value_size = 3},   // odd sizes
    {.lengths = {{40, 40}}, .key_size = 192, .value_size = 128},  // keys wider than values
    {.lengths = {{40, 40}}, .key_size = 256, .value_size = 256},
    {.lengths = {{90, 90}, {20, 70}}, .window = 1},
    {.lengths = {{150, 150}, {4, 200}}, .window = 33},  // blocks left of the window
    {.lengths = {{150, 150}, {30, 20}}, .causal = false},
    {.lengths = {{150, 150}, {3, 90}}, .causal = false, .window = 20},
    {.lengths = {{80, 80}, {2, 80}}, .softcap = 2},
    {.lengths = {{80, 80}, {2, 80}}, .sinks = true, .scale = 1},
    {.lengths = {{60, 60}, {1, 60}}, .gap = 3, .unused_keys = 5, .row_gap = 7},
    {.lengths = {{40, 40}}, .scale = 8},  // one key takes all
};

TEST(VarlenAttention, EveryVariantMatchesTheReference) {
  unsigned seed = 1;
  for (const Shape& shape : kShapes) {
    ++seed;
    for_variants([&](const AttentionVariant& variant) {
      SCOPED_TRACE("shape " + std::to_string(&shape - kShapes));
      Case c(shape, variant.dtype, seed);
      c.run(variant);
      expect_reference(c, reference(c));
    });
    if (HasFatalFailure()) return;
  }
}

Shape random_shape(std::mt19937& rng) {
  const auto pick = [&](std::initializer_list<int> of) { return of.begin()[rng() % of.size()]; };
  Shape s;
  for (int d = pick({1, 2, 3, 5}); d > 0; --d) {
    const int lq = static_cast<int>(rng() % (rng() % 4 == 0 ? 140 : 40));
    s.lengths.push_back({lq, pick({lq, lq, lq, lq + 17, lq / 2, 0})});
  }
  s.kv_heads = pick({1, 2});
  s.heads = s.kv_heads * pick({1, 2, 4});
  s.key_size = pick({8, 16, 20, 32, 64, 72});
  s.value_size = pick({8, 16, 32, 33, 64});
  s.causal = rng() % 3 != 0;
  s.window = rng() % 2 != 0 ? 0 : pick({1, 7, 40});
  s.softcap = rng() % 4 != 0 ? 0.f : 5.f;
  s.sinks = rng() % 3 == 0;
  s.gap = pick({0, 0, 3});
  s.unused_keys = pick({0, 0, 2});
  s.row_gap = pick({0, 1, 8});
  return s;
}

TEST(VarlenAttention, RandomPackingsAndOptions) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    for_variants([&](const AttentionVariant& variant) {
      std::mt19937 rng(seed);
      Case c(random_shape(rng), variant.dtype, seed);
      c.run(variant);
      expect_reference(c, reference(c));
    });
    if (HasFatalFailure()) return;
  }
}

// The rows of document `d` of `c` in a case of its own.
Case alone(const Case& c, std::size_t d) {
  Shape s = c.shape;
  s.lengths = {c.shape.lengths[d]};
  s.gap = 0;
  Case one(s, c.q.dtype, 0);
  const auto [lq, lk] = s.lengths[0];
  one.sinks = c.sinks;
  one.q.copy_rows(0, c.q, c.query_offsets[d], lq);
  one.dout.copy_rows(0, c.dout, c.query_offsets[d], lq);
  one.k.copy_rows(0, c.k, c.key_offsets[d], lk);
  one.v.copy_rows(0, c.v, c.key_offsets[d], lk);
  return one;
}

void expect_same_document(const Case& a, std::size_t da, const Case& b, std::size_t db) {
  const auto [lq, lk] = a.shape.lengths[da];
  const std::size_t qa = a.query_offsets[da], qb = b.query_offsets[db];
  const std::size_t ka = a.key_offsets[da], kb = b.key_offsets[db];
  EXPECT_EQ(a.out.rows(qa, lq), b.out.rows(qb, lq)) << "out";
  EXPECT_EQ(a.dq.rows(qa, lq), b.dq.rows(qb, lq)) << "dq";
  EXPECT_EQ(a.dk.rows(ka, lk), b.dk.rows(kb, lk)) << "dk";
  EXPECT_EQ(a.dv.rows(ka, lk), b.dv.rows(kb, lk)) << "dv";
  for (std::size_t h = 0; h < a.shape.heads; ++h)
    for (std::size_t i = 0; i < static_cast<std::size_t>(lq); ++i)
      EXPECT_EQ(std::bit_cast<std::uint32_t>(a.lse[h * a.q.tokens + qa + i]),
                std::bit_cast<std::uint32_t>(b.lse[h * b.q.tokens + qb + i]));
}

const Shape kMixed = {.lengths = {{130, 130}, {1, 70}, {33, 33}, {0, 0}, {260, 260}, {17, 40}},
                      .heads = 4,
                      .kv_heads = 2,
                      .key_size = 40,
                      .value_size = 24,
                      .sinks = true};

TEST(VarlenAttention, ADocumentHasTheSameBitsAloneAndPacked) {
  for_variants([&](const AttentionVariant& variant) {
    Case packed(kMixed, variant.dtype, 5);
    packed.run(variant);
    for (std::size_t d = 0; d < kMixed.lengths.size(); ++d) {
      Case one = alone(packed, d);
      one.run(variant);
      expect_same_document(packed, d, one, 0);
    }
  });
}

TEST(VarlenAttention, ThreadsDoNotChangeABit) {
  ThreadPool pool(3);
  const auto on_pool = [&](std::size_t count, std::size_t grain, ParallelBody body) {
    pool.parallel_for(count, grain, body);
  };
  Shape shape = kMixed;
  shape.lengths.push_back({520, 520});
  for_variants([&](const AttentionVariant& variant) {
    Case one(shape, variant.dtype, 6);
    one.run(variant);
    // 3 threads: the long document is cut forward; 1000: every unit of any size is cut both ways.
    for (const int threads : {3, 1000}) {
      Case many(shape, variant.dtype, 6);
      many.run(variant, on_pool, threads);
      for (std::size_t d = 0; d < shape.lengths.size(); ++d) expect_same_document(one, d, many, d);
      EXPECT_EQ(
          0, std::memcmp(one.dsinks.data(), many.dsinks.data(), one.dsinks.size() * sizeof(float)));
    }
  });
}

TEST(VarlenAttention, NanStaysInItsDocument) {
  for_variants([&](const AttentionVariant& variant) {
    Case clean(kMixed, variant.dtype, 7), dirty(kMixed, variant.dtype, 7);
    const std::size_t q0 = dirty.query_offsets[2], k0 = dirty.key_offsets[2];
    for (std::size_t t = 0; t < 33; ++t) {
      dirty.q.put(dirty.q.at(q0 + t, 0, 0), std::nanf(""));
      dirty.k.put(dirty.k.at(k0 + t, 0, 3), std::nanf(""));
      dirty.v.put(dirty.v.at(k0 + t, 1, 1), std::numeric_limits<float>::infinity());
      dirty.dout.put(dirty.dout.at(q0 + t, 2, 0), std::nanf(""));
    }
    clean.run(variant);
    dirty.run(variant);
    EXPECT_TRUE(std::isnan(dirty.out(q0 + 32, 0, 0)));
    for (const std::size_t d : {0, 1, 3, 4, 5}) expect_same_document(clean, d, dirty, d);
  });
}

TEST(VarlenAttention, RowsOutsideEveryDocumentAreZero) {
  for_variants([&](const AttentionVariant& variant) {
    Case c({.lengths = {{5, 5}, {0, 0}, {0, 0}}, .gap = 4, .unused_keys = 2}, variant.dtype, 8);
    c.run(variant);
    for (const Tensor* t : {&c.out, &c.dq})
      for (const std::size_t row : {0, 3, 9, 12})
        for (std::size_t d = 0; d < t->size; ++d) EXPECT_EQ(0, (*t)(row, 1, d));
    for (const Tensor* t : {&c.dk, &c.dv})
      for (const std::size_t row : {0, 3, 9, 10, 11, 18})
        for (std::size_t d = 0; d < t->size; ++d) EXPECT_EQ(0, (*t)(row, 0, d));
    EXPECT_EQ(0, c.lse[0]);
  });
}

TEST(VarlenAttention, RejectsWhatContradictsItself) {
  const AttentionVariant& variant = varlen_attention_variants().back();
  const auto fails = [&](auto change) {
    Case c({.lengths = {{3, 3}, {4, 4}}}, variant.dtype, 9);
    AttentionProblem p = c.problem();
    change(c, p);
    EXPECT_THROW(varlen_attention(
                     {p, c.q.view(), c.k.view(), c.v.view(), c.out.mutable_view(), c.lse.data()},
                     serial_for, 1),
                 Error);
  };
  fails([](Case& c, AttentionProblem&) { c.query_offsets[2] = 8; });  // beyond the tokens
  fails([](Case& c, AttentionProblem&) { c.query_offsets[1] = 8; });  // descends
  fails([](Case& c, AttentionProblem&) { c.key_offsets[0] = -1; });
  fails([](Case& c, AttentionProblem&) { c.key_lengths[1] = 5; });  // more than the document holds
  fails([](Case&, AttentionProblem& p) { p.kv_heads = 3; });
  fails([](Case&, AttentionProblem& p) { p.key_size = 513; });
  fails([](Case&, AttentionProblem& p) { p.scale = -1; });
  fails([](Case&, AttentionProblem& p) { p.window = -1; });
}

}  // namespace
}  // namespace monograph
