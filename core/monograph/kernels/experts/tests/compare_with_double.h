// One call of a layer of experts and its gradients, and their comparison with double: every value,
// over threads, with `pre` kept and computed again.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "monograph/kernels/experts/tests/layer_in_double.h"

namespace monograph {

struct Results {
  Bytes y, pre, dx, dweights, dbias1, dbias2, da1, db1, da2, db2, dw1, dw2;
  bool operator==(const Results&) const = default;
};

struct Run {
  bool weights = false, save = true;
  int threads = 1;
};

inline Results run(const Layer& layer, const Bytes& dy, const Run& how) {
  const ExpertsProblem& p = layer.problem;
  const std::size_t element = size_bytes(p.dtype);
  ThreadPool pool(how.threads);
  const auto threads = [&](std::size_t count, std::size_t grain, ParallelBody body) {
    pool.parallel_for(count, grain, body);
  };
  Results r;
  r.y.assign(p.tokens * p.down.out * element, 0xab);
  r.pre.assign(p.all_slots() * p.up.out * element, 0xab);
  experts(p, r.y.data(), how.save ? r.pre.data() : nullptr, threads);
  r.dx.assign(p.x.rows * p.up.in * element, 0xab);
  r.dweights.assign(layer.weights.size(), 0xab);
  ExpertsGradients g;
  g.dx = r.dx.data();
  g.dweights = r.dweights.data();
  const auto want = [&](const Bytes& like, Bytes& bytes, void*& out) {
    bytes.assign(like.size(), 0xab);
    if (!like.empty()) out = bytes.data();
  };
  want(layer.up.bias, r.dbias1, g.dbias1);
  want(layer.down.bias, r.dbias2, g.dbias2);
  want(layer.up.a, r.da1, g.da1);
  want(layer.up.b, r.db1, g.db1);
  want(layer.down.a, r.da2, g.da2);
  want(layer.down.b, r.db2, g.db2);
  const Matrix dy_rows = {dy.data(), p.tokens, p.down.out, p.down.out};
  experts_backward(p, dy_rows, how.save ? r.pre.data() : nullptr, g, threads);
  if (!how.weights) return r;
  const auto bytes = [](const Stack& stack, const ExpertsProjection& projection) {
    return Bytes(stack.dense.size() * size_bytes(projection.dtype), 0xab);
  };
  r.dw1 = bytes(layer.up, p.up);
  r.dw2 = bytes(layer.down, p.down);
  experts_dw(p, dy_rows, how.save ? r.pre.data() : nullptr, r.dw1.data(), r.dw2.data(), threads);
  return r;
}

// The distance of two vectors as a part of the second's length.
inline double distance(const Doubles& got, const Doubles& want) {
  double off = 0, length = 1e-300;
  for (std::size_t i = 0; i < want.size(); ++i) {
    off += (got[i] - want[i]) * (got[i] - want[i]);
    length += want[i] * want[i];
  }
  return std::sqrt(off / length);
}

// At most four roundings lie between an operand and a result; sums in fp32 add less.
inline double tolerance(DType dtype) {
  return dtype == DType::kFloat32 ? 0x1p-19 : dtype == DType::kFloat16 ? 4 * 0x1p-11 : 4 * 0x1p-8;
}

inline void expect_near(const char* what, DType dtype, const Bytes& got, const Doubles& want,
                        DType rounds) {
  ASSERT_EQ(got.size(), want.size() * size_bytes(dtype)) << what;
  EXPECT_LE(distance(loaded(dtype, got), want), tolerance(rounds)) << what;
}

inline void compare(const Layer& layer) {
  const ExpertsProblem& p = layer.problem;
  const LayerShape& s = layer.shape;
  Layer* const drawing = const_cast<Layer*>(&layer);
  const Bytes dy_bytes = stored(s.dtype, drawing->normal(s.tokens * s.hidden, 1.0));
  const Doubles dy = loaded(s.dtype, dy_bytes);
  const bool plain = s.format == "plain" && p.up.weight.first.format == Format::kPlain;
  const Results got = run(layer, dy_bytes, {plain});
  const Doubles got_pre = loaded(s.dtype, got.pre);

  Exact up(layer, layer.up, p.up), down(layer, layer.down, p.down);
  Doubles y(s.tokens * s.hidden), dx(y.size()), pre(got_pre.size()), dweights(layer.ids.size());
  // Places, written out: slots of expert 0 in order, those of expert 1, and so on.
  std::size_t place = 0;
  for (std::size_t e = 0; e < s.experts; ++e)
    for (std::size_t slot = 0; slot < layer.ids.size(); ++slot) {
      if (layer.ids[slot] != static_cast<std::int64_t>(e)) continue;
      const std::size_t t = slot / s.slots, width = p.up.out;
      const double w = layer.weight_values[slot];
      const double* x = layer.x_values.data() + t * s.hidden;
      const Doubles exact = up.forward(e, x);
      std::copy(exact.begin(), exact.end(),
                pre.begin() + static_cast<std::ptrdiff_t>(place * width));
      // From here on what the layer rounded pre to: a corner of the activation may lie between.
      const double* row = got_pre.data() + place * width;
      const auto gate_of = [&](std::size_t i) { return s.interleaved ? 2 * i : i; };
      const auto up_of = [&](std::size_t i) {
        return !is_gated(s.activation) ? i : s.interleaved ? 2 * i + 1 : s.inner + i;
      };
      Doubles h(s.inner), weighted(s.hidden), dpre(width);
      for (std::size_t i = 0; i < s.inner; ++i)
        h[i] = exact_activation(p, row[gate_of(i)], row[up_of(i)]);
      const Doubles d = down.forward(e, h.data());
      for (std::size_t c = 0; c < s.hidden; ++c) {
        y[t * s.hidden + c] += w * d[c];
        weighted[c] = w * dy[t * s.hidden + c];
        dweights[slot] += d[c] * dy[t * s.hidden + c];
      }
      const Doubles dh = down.back(e, h.data(), weighted.data());
      for (std::size_t i = 0; i < s.inner; ++i) {
        const double g = row[gate_of(i)], u = row[up_of(i)];
        dpre[gate_of(i)] = dh[i] * exact_slope(p, g, u, true);
        if (is_gated(s.activation)) dpre[up_of(i)] = dh[i] * exact_slope(p, g, u, false);
      }
      const Doubles part = up.back(e, x, dpre.data());
      for (std::size_t c = 0; c < s.hidden; ++c) dx[t * s.hidden + c] += part[c];
      ++place;
    }
  EXPECT_TRUE(std::all_of(got_pre.begin() + static_cast<std::ptrdiff_t>(place * p.up.out),
                          got_pre.end(), [](double v) { return v == 0; }));
  expect_near("pre", s.dtype, got.pre, pre, s.dtype);
  expect_near("y", s.dtype, got.y, y, s.dtype);
  expect_near("dx", s.dtype, got.dx, dx, s.dtype);
  expect_near("dweights", s.side, got.dweights, dweights, s.dtype);
  expect_near("dbias1", s.side, got.dbias1, up.dbias, s.dtype);
  expect_near("dbias2", s.side, got.dbias2, down.dbias, s.dtype);
  expect_near("da1", s.side, got.da1, up.da, s.dtype);
  expect_near("db1", s.side, got.db1, up.db, s.dtype);
  expect_near("da2", s.side, got.da2, down.da, s.dtype);
  expect_near("db2", s.side, got.db2, down.db, s.dtype);
  if (plain) {
    expect_near("dw1", p.up.dtype, got.dw1, layer.as_stored(up.dense, p.up), s.dtype);
    expect_near("dw2", p.down.dtype, got.dw2, layer.as_stored(down.dense, p.down), s.dtype);
  }

  for (const Run how : {Run{plain, true, 2}, Run{plain, true, 3}})
    EXPECT_EQ(run(layer, dy_bytes, how), got) << how.threads << " threads";
  Results again = run(layer, dy_bytes, {plain, false, 2});
  again.pre = got.pre;
  EXPECT_EQ(again, got) << "pre computed again";
}

}  // namespace monograph
