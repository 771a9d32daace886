// The rule as it is defined, token by token in double, and its adjoint; the inputs and outputs of a
// kernel around it.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/kernels/gated_delta_rule/gated_delta_rule.h"

namespace monograph {

enum class Kind { kPlain, kStrong, kMixed, kCorrelated, kTwice };

struct Shape {
  std::vector<int> lengths = {};
  std::size_t key_heads = 1, value_heads = 2, key_size = 32, value_size = 32;
  bool state = false, l2norm = true, narrow_gates = false;
  Kind kind = Kind::kPlain;
  float scale = 0.25f;
  int gap = 0;              // rows before the first and after the last document
  std::size_t row_gap = 0;  // elements between heads that belong to nobody
};

// [tokens, heads, size] with NaN in whatever is not data.
struct Numbers {
  DType dtype;
  std::size_t tokens, heads, size, stride;
  std::vector<std::byte> bytes;

  Numbers(DType type, std::size_t t, std::size_t h, std::size_t s, std::size_t row_gap)
      : dtype(type), tokens(t), heads(h), size(s), stride(s + row_gap) {
    bytes.resize(t * h * stride * size_bytes(type));
    for (std::size_t i = 0; i < t * h * stride; ++i) put(i, std::nanf(""));
  }
  std::size_t at(std::size_t t, std::size_t h, std::size_t d) const {
    return (t * heads + h) * stride + d;
  }
  void put(std::size_t i, float x) {
    with_type(dtype, [&]<class T>() {
      const T value = from_float<T>(x);
      std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
    });
  }
  double operator()(std::size_t t, std::size_t h, std::size_t d = 0) const {
    return with_type(dtype, [&]<class T>() -> double {
      T value;
      std::memcpy(&value, bytes.data() + at(t, h, d) * sizeof(T), sizeof(T));
      return to_float(value);
    });
  }
  std::vector<double> row(std::size_t t, std::size_t h) const {
    std::vector<double> out(size);
    for (std::size_t d = 0; d < size; ++d) out[d] = (*this)(t, h, d);
    return out;
  }
  // The bytes of rows [begin, begin + count) of a head, the gaps left out.
  std::vector<std::byte> rows(std::size_t begin, std::size_t count, std::size_t h) const {
    std::vector<std::byte> out;
    for (std::size_t t = begin; t < begin + count; ++t) {
      const std::byte* const from = bytes.data() + at(t, h, 0) * size_bytes(dtype);
      out.insert(out.end(), from, from + size * size_bytes(dtype));
    }
    return out;
  }
  void copy_rows(std::size_t to, const Numbers& from, std::size_t begin, std::size_t count) {
    const std::size_t row = heads * stride * size_bytes(dtype);
    std::copy_n(from.bytes.data() + begin * row, count * row, bytes.data() + to * row);
  }
  std::ptrdiff_t token_stride() const { return static_cast<std::ptrdiff_t>(heads * stride); }
  std::ptrdiff_t head_stride() const { return static_cast<std::ptrdiff_t>(stride); }
  HeadsView view() const { return {bytes.data(), token_stride(), head_stride()}; }
  MutableHeadsView out() { return {bytes.data(), token_stride(), head_stride()}; }
  GateView gates() const { return {bytes.data(), dtype, token_stride(), head_stride()}; }
  MutableGateView gates_out() { return {bytes.data(), dtype, token_stride(), head_stride()}; }
};

struct Case {
  Shape shape;
  std::vector<std::int32_t> offsets;
  Numbers q, k, v, g, beta, out, dout, dq, dk, dv, dg, dbeta;
  std::vector<float> state, final_state, dfinal, dstate;

  static std::size_t tokens_of(const Shape& s) {
    std::size_t sum = 2 * static_cast<std::size_t>(s.gap);
    for (const int length : s.lengths) sum += static_cast<std::size_t>(length);
    return sum;
  }
  Case(const Shape& s, DType dtype, unsigned seed)
      : shape(s),
        q(dtype, tokens_of(s), s.key_heads, s.key_size, s.row_gap),
        k(q),
        v(dtype, q.tokens, s.value_heads, s.value_size, s.row_gap),
        g(s.narrow_gates ? dtype : DType::kFloat32, q.tokens, s.value_heads, 1, s.row_gap),
        beta(s.narrow_gates ? DType::kFloat32 : dtype, q.tokens, s.value_heads, 1, 0),
        out(v),
        dout(v),
        dq(q),
        dk(q),
        dv(v),
        dg(g),
        dbeta(beta) {
    std::mt19937 rng(seed);
    std::int32_t token = s.gap;
    const std::vector<float> bases = random(rng, 8 * s.key_size);
    for (const int length : s.lengths) {
      offsets.push_back(token);
      for (int t = 0; t < length; ++t) fill(static_cast<std::size_t>(token++), bases, rng);
    }
    offsets.push_back(token);
    const std::size_t states = s.lengths.size() * s.value_heads * s.key_size * s.value_size;
    if (s.state) state = random(rng, states);
    if (s.state) dfinal = random(rng, states);
    final_state.assign(states, std::nanf(""));
    dstate.assign(state.size(), std::nanf(""));
  }
  static std::vector<float> random(std::mt19937& rng, std::size_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> out(count);
    for (float& x : out) x = normal(rng);
    return out;
  }
  void fill(std::size_t t, const std::vector<float>& bases, std::mt19937& rng) {
    const auto put = [&](Numbers& to, std::size_t h, float factor) {
      const std::vector<float> x = random(rng, to.size);
      for (std::size_t d = 0; d < to.size; ++d) to.put(to.at(t, h, d), factor * x[d]);
    };
    const float small = shape.l2norm ? 1 : 1 / std::sqrt(static_cast<float>(shape.key_size));
    const bool alike = shape.kind == Kind::kCorrelated || shape.kind == Kind::kTwice;
    for (std::size_t h = 0; h < shape.key_heads; ++h) {
      put(q, h, small);
      put(k, h, small);
      const std::size_t base = rng() % 8 * shape.key_size;
      for (std::size_t d = 0; alike && d < k.size; ++d)
        k.put(k.at(t, h, d), small * bases[base + d] + 0.3f * static_cast<float>(k(t, h, d)));
    }
    for (std::size_t h = 0; h < shape.value_heads; ++h) {
      put(v, h, 1);
      put(dout, h, 1);
      const std::vector<float> x = random(rng, 3);
      const float b = 1 / (1 + std::exp(-x[0] - (alike ? 2.f : 0.f)));
      beta.put(beta.at(t, h, 0), shape.kind == Kind::kTwice ? 2 * b : b);
      const float soft = std::log1p(std::exp(x[1]));
      float gate = -0.05f * soft;
      if (shape.kind == Kind::kStrong) gate = -20 * soft;
      if (shape.kind == Kind::kMixed && x[2] > 1.6f) gate = -30 * soft;
      if (alike) gate = -0.003f * soft;
      g.put(g.at(t, h, 0), gate);
    }
  }

  DeltaRuleProblem problem() const {
    return {q.dtype,
            q.tokens,
            shape.key_heads,
            shape.value_heads,
            shape.key_size,
            shape.value_size,
            shape.scale,
            shape.l2norm,
            shape.lengths.size(),
            offsets.data(),
            state.empty() ? nullptr : state.data()};
  }
  void run(const DeltaRuleVariant& variant, ParallelFor parallel_for = serial_for) {
    gated_delta_rule_with(variant,
                          {problem(), q.view(), k.view(), v.view(), g.gates(), beta.gates(),
                           out.out(), final_state.data()},
                          parallel_for);
    gated_delta_rule_backward_with(
        variant,
        {problem(), q.view(), k.view(), v.view(), dout.view(), g.gates(), beta.gates(),
         dfinal.empty() ? nullptr : dfinal.data(), dq.out(), dk.out(), dv.out(), dg.gates_out(),
         dbeta.gates_out(), dstate.empty() ? nullptr : dstate.data()},
        parallel_for);
  }
  std::size_t state_at(std::size_t document, std::size_t h) const {
    return (document * shape.value_heads + h) * shape.key_size * shape.value_size;
  }
};

using Row = std::vector<double>;

struct Reference {
  std::vector<Row> out, dq, dk, dv;  // [token * heads + head]
  Row dg, dbeta, final_state, dstate;
};

// One document and one value head.
inline void recurrence(const Case& c, std::size_t document, std::size_t h, Reference& r) {
  const Shape& s = c.shape;
  const std::size_t n = s.key_size, m = s.value_size, hk = h / (s.value_heads / s.key_heads);
  const std::size_t begin = c.offsets[document], length = s.lengths[document];
  const std::size_t at = c.state_at(document, h);
  const auto inverse = [&](const Row& x) {
    double sum = 1e-6;
    for (const double value : x) sum += value * value;
    return s.l2norm ? 1 / std::sqrt(sum) : 1;
  };
  Row state(n * m, 0.);
  if (s.state) state.assign(c.state.begin() + at, c.state.begin() + at + n * m);
  std::vector<Row> decayed, after;
  for (std::size_t t = begin; t < begin + length; ++t) {
    const Row q = c.q.row(t, hk), k = c.k.row(t, hk), v = c.v.row(t, h);
    const double rq = inverse(q), rk = inverse(k), b = c.beta(t, h);
    Row& out = r.out[t * s.value_heads + h];
    for (double& x : state) x *= std::exp(c.g(t, h));
    decayed.push_back(state);
    for (std::size_t j = 0; j < m; ++j) {
      double u = v[j];
      for (std::size_t i = 0; i < n; ++i) u -= rk * k[i] * state[i * m + j];
      for (std::size_t i = 0; i < n; ++i) state[i * m + j] += rk * k[i] * b * u;
      for (std::size_t i = 0; i < n; ++i) out[j] += s.scale * rq * q[i] * state[i * m + j];
    }
    after.push_back(state);
  }
  std::copy(state.begin(), state.end(), r.final_state.begin() + at);
  Row dstate(n * m, 0.);
  if (s.state) dstate.assign(c.dfinal.begin() + at, c.dfinal.begin() + at + n * m);
  for (std::size_t i = length; i-- > 0;) {
    const std::size_t t = begin + i;
    const Row q = c.q.row(t, hk), k = c.k.row(t, hk), v = c.v.row(t, h), dout = c.dout.row(t, h);
    const double rq = inverse(q), rk = inverse(k), b = c.beta(t, h), e = std::exp(c.g(t, h));
    Row dq(n, 0.), dk(n, 0.);
    for (std::size_t j = 0; j < m; ++j) {
      double u = v[j], dvn = 0;
      for (std::size_t a = 0; a < n; ++a) {
        u -= rk * k[a] * decayed[i][a * m + j];
        dq[a] += s.scale * after[i][a * m + j] * dout[j];
        dstate[a * m + j] += s.scale * rq * q[a] * dout[j];
        dvn += rk * k[a] * dstate[a * m + j];
      }
      r.dbeta[t * s.value_heads + h] += dvn * u;
      r.dv[t * s.value_heads + h][j] += b * dvn;
      for (std::size_t a = 0; a < n; ++a) {
        dk[a] += dstate[a * m + j] * b * u - decayed[i][a * m + j] * b * dvn;
        dstate[a * m + j] -= rk * k[a] * b * dvn;
        r.dg[t * s.value_heads + h] += dstate[a * m + j] * decayed[i][a * m + j];
        dstate[a * m + j] *= e;
      }
    }
    const auto through_norm = [&](const Row& x, const Row& dy, double factor, Row& dx) {
      double along = 0;
      for (std::size_t a = 0; s.l2norm && a < n; ++a) along += x[a] * dy[a] * factor * factor;
      for (std::size_t a = 0; a < n; ++a) dx[a] += factor * (dy[a] - along * x[a]);
    };
    through_norm(q, dq, rq, r.dq[t * s.key_heads + hk]);
    through_norm(k, dk, rk, r.dk[t * s.key_heads + hk]);
  }
  if (s.state) std::copy(dstate.begin(), dstate.end(), r.dstate.begin() + at);
}

inline Reference reference(const Case& c) {
  Reference r;
  const Shape& s = c.shape;
  r.out = r.dv = std::vector<Row>(c.q.tokens * s.value_heads, Row(s.value_size, 0.));
  r.dq = r.dk = std::vector<Row>(c.q.tokens * s.key_heads, Row(s.key_size, 0.));
  r.dg = r.dbeta = Row(c.q.tokens * s.value_heads, 0.);
  r.final_state.assign(c.final_state.size(), 0.);
  r.dstate.assign(c.dstate.size(), 0.);
  for (std::size_t d = 0; d < s.lengths.size(); ++d)
    for (std::size_t h = 0; h < s.value_heads; ++h) recurrence(c, d, h, r);
  return r;
}

// The distance of two arrays over the length of the one wanted.
struct Distance {
  double error = 0, length = 1e-24;
  void add(double got, double want) {
    error += (got - want) * (got - want);
    length += want * want;
  }
  double relative() const { return std::sqrt(error / length); }
};

inline double distance(const Numbers& got, const std::vector<Row>& want) {
  Distance d;
  for (std::size_t t = 0; t < got.tokens; ++t)
    for (std::size_t h = 0; h < got.heads; ++h)
      for (std::size_t i = 0; i < got.size; ++i) d.add(got(t, h, i), want[t * got.heads + h][i]);
  return d.relative();
}
inline double distance(const Numbers& got, const Row& want) {
  Distance d;
  for (std::size_t t = 0; t < got.tokens; ++t)
    for (std::size_t h = 0; h < got.heads; ++h) d.add(got(t, h), want[t * got.heads + h]);
  return d.relative();
}
inline double distance(const std::vector<float>& got, const Row& want) {
  Distance d;
  for (std::size_t i = 0; i < got.size(); ++i) d.add(got[i], want[i]);
  return d.relative();
}

// Calls body(variant) for each variant the machine and the cap allow.
template <class Body>
void for_variants(const Body& body) {
  for (const DeltaRuleVariant& v : gated_delta_rule_variants()) {
    if (v.isa > best_isa()) continue;
    SCOPED_TRACE(std::string(name_of(v.isa)) + " " + name_of(v.dtype));
    body(v);
    if (testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace monograph
