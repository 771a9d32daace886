// Attention written out in double, pair by pair: what a query may not see is never read. With the
// cases and the comparison that the tests of this folder share.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <utility>

#include "monograph/base/float_types.h"
#include "monograph/kernels/varlen_attention/varlen_attention.h"

namespace monograph {

struct Shape {
  std::vector<std::pair<int, int>> lengths;  // queries, keys of each document
  std::size_t heads = 2, kv_heads = 1, key_size = 16, value_size = 16;
  bool causal = true;
  int window = 0;
  float softcap = 0;
  bool sinks = false;
  float scale = -1;         // below 0: 1 / sqrt(key_size)
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

inline std::size_t tokens_of(const Shape& s, bool keys) {
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
    return shape.scale >= 0 ? shape.scale : 1 / std::sqrt(static_cast<float>(shape.key_size));
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
    run_backward(variant, parallel_for, threads);
  }
  void run_backward(const AttentionVariant& variant, ParallelFor parallel_for = serial_for,
                    int threads = 1) {
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

inline bool visible(const Shape& s, int i, int j, int lq, int lk) {
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
        if (!visible(s, i, j, lq, lk)) continue;
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

inline Reference reference(const Case& c) {
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
inline double unit_of(DType dtype) {
  return dtype == DType::kBFloat16 ? 0x1p-8 : dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-17;
}

inline void expect_close(const Tensor& got, const std::vector<double>& want,
                         const std::vector<double>& size, double factor, const std::string& name) {
  for (std::size_t t = 0; t < got.tokens; ++t)
    for (std::size_t h = 0; h < got.heads; ++h)
      for (std::size_t d = 0; d < got.size; ++d) {
        const std::size_t i = got.at(t, h, d);
        const double bound = factor * unit_of(got.dtype) * size[i] + 1e-7;
        ASSERT_NEAR(got.get(i), want[i], bound) << name << " at " << t << "," << h << "," << d;
      }
}

inline void expect_reference(const Case& c, const Reference& r) {
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

}  // namespace monograph
