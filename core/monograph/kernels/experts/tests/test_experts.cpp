// Values and gradients of layers of experts against double, over formats, activations, layouts,
// biases and low-rank parts; bits over threads, batches, and against dequantised weights.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <vector>

#include "monograph/kernels/experts/kernels.h"
#include "monograph/kernels/experts/routing.h"
#include "monograph/kernels/experts/tests/layer_in_double.h"
#include "monograph/kernels/linear/products.h"

namespace monograph {
namespace {

struct Results {
  Bytes y, pre, dx, dweights, dbias1, dbias2, da1, db1, da2, db2, dw1, dw2;
  bool operator==(const Results&) const = default;
};

struct Run {
  bool weights = false, save = true;
  int threads = 1;
};

Results run(const Layer& layer, const Bytes& dy, const Run& how) {
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
double distance(const Doubles& got, const Doubles& want) {
  double off = 0, length = 1e-300;
  for (std::size_t i = 0; i < want.size(); ++i) {
    off += (got[i] - want[i]) * (got[i] - want[i]);
    length += want[i] * want[i];
  }
  return std::sqrt(off / length);
}

// At most four roundings lie between an operand and a result; sums in fp32 add less.
double tolerance(DType dtype) {
  return dtype == DType::kFloat32 ? 0x1p-19 : dtype == DType::kFloat16 ? 4 * 0x1p-11 : 4 * 0x1p-8;
}

void expect_near(const char* what, DType dtype, const Bytes& got, const Doubles& want,
                 DType rounds) {
  ASSERT_EQ(got.size(), want.size() * size_bytes(dtype)) << what;
  EXPECT_LE(distance(loaded(dtype, got), want), tolerance(rounds)) << what;
}

void compare(const Layer& layer) {
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

TEST(Experts, EveryActivationAndLayoutOfPlainWeights) {
  unsigned seed = 1;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32})
    for (std::size_t a = 0; a < kExpertsActivations; ++a)
      for (const bool interleaved : {false, true}) {
        LayerShape shape;
        shape.dtype = dtype;
        shape.activation = static_cast<ExpertsActivation>(a);
        if (interleaved && !is_gated(shape.activation)) continue;
        shape.interleaved = interleaved;
        shape.transposed = seed % 2 == 0;
        shape.biases = seed % 3 != 0;
        shape.rank1 = seed % 4 == 1 ? 0 : 3;
        shape.rank2 = seed % 5 == 1 ? 0 : 17;
        shape.side = seed % 2 == 0 ? dtype : DType::kFloat32;
        SCOPED_TRACE(shape.name());
        compare(Layer(shape, seed++));
      }
}

TEST(Experts, EveryFormat) {
  unsigned seed = 50;
  for (const char* format : {"nf4", "mxfp4", "nvfp4", "fp8-block"})
    for (const bool low_rank : {false, true}) {
      LayerShape shape;
      shape.format = format;
      shape.hidden = 96;
      shape.inner = format[0] == 'n' && format[1] == 'f' ? 37 : 160;
      if (shape.inner == 37) shape.hidden = 90;
      shape.activation = low_rank ? ExpertsActivation::kClampedGlu : ExpertsActivation::kSiluMul;
      shape.interleaved = shape.biases = low_rank;
      shape.rank1 = low_rank ? 4 : 0;
      shape.rank2 = low_rank ? 16 : 0;
      SCOPED_TRACE(shape.name());
      compare(Layer(shape, seed++));
    }
}

TEST(Experts, APackedWeightGivesTheBitsOfItsDequantisedValues) {
  for (const char* format : {"nf4", "mxfp4", "nvfp4", "fp8-block"})
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      LayerShape shape;
      shape.format = format;
      shape.dtype = dtype;
      shape.hidden = 192;
      shape.inner = 96;
      shape.rank1 = shape.rank2 = 4;
      shape.tokens = 40;
      shape.experts = 3;
      SCOPED_TRACE(shape.name());
      Layer layer(shape, 7);
      const Bytes dy = stored(dtype, layer.normal(shape.tokens * shape.hidden, 1.0));
      const Results packed = run(layer, dy, {});
      layer.use_plain();
      EXPECT_EQ(run(layer, dy, {}), packed);
    }
}

// Gate and up quantised each on its own, experts one by one.
TEST(Experts, MatricesQuantisedOneByOne) {
  LayerShape shape;
  shape.hidden = 96;
  shape.inner = 32;
  shape.rank1 = 2;
  shape.biases = true;
  Layer layer(shape, 9);
  std::vector<SmallWeight> matrices;
  for (std::size_t i = 0; i < 2 * shape.experts; ++i)
    matrices.push_back(small_weight("nvfp4", ScaleKind::kE4m3, 16, false,
                                    {shape.inner, shape.hidden}, static_cast<unsigned>(i)));
  Bytes values, blocks, tensors;
  layer.up.dense.clear();
  for (const SmallWeight& m : matrices) {
    values.insert(values.end(), m.values.begin(), m.values.end());
    blocks.insert(blocks.end(), m.scales[0].begin(), m.scales[0].end());
    tensors.insert(tensors.end(), m.scales[1].begin(), m.scales[1].end());
    Bytes dense(shape.inner * shape.hidden * 2);
    dequantize(m.view, shape.dtype, dense.data(), serial_for);
    const Doubles elements = loaded(shape.dtype, dense);
    layer.up.dense.insert(layer.up.dense.end(), elements.begin(), elements.end());
  }
  const ByteSpan scales[] = {{blocks.data(), blocks.size()}, {tensors.data(), tensors.size()}};
  const std::size_t whole[] = {shape.experts, 2 * shape.inner, shape.hidden};
  layer.problem.up.weight = bind_grids(*find_format("nvfp4"), 16, whole, shape.inner,
                                       {values.data(), values.size()}, scales);
  compare(layer);
}

TEST(Experts, ATokenAloneHasTheBitsOfTheTokenInABatch) {
  for (const bool transposed : {false, true}) {
    LayerShape shape;
    shape.tokens = 90;
    shape.slots = 3;
    shape.transposed = transposed;
    shape.biases = true;
    shape.rank1 = shape.rank2 = 5;
    Layer layer(shape, 11);
    const Bytes dy = stored(shape.dtype, layer.normal(shape.tokens * shape.hidden, 1.0));
    const Results all = run(layer, dy, {false, true, 2});
    const std::size_t row = shape.hidden * 2;
    for (const std::size_t t : {0u, 17u, 89u}) {
      Layer one(shape, 11);
      one.problem.tokens = one.problem.x.rows = 1;
      one.problem.x.data = one.x.data() + t * row;
      one.problem.ids += t * shape.slots;
      one.problem.weights = one.weights.data() + t * shape.slots * 4;
      const Bytes own(dy.begin() + static_cast<std::ptrdiff_t>(t * row),
                      dy.begin() + static_cast<std::ptrdiff_t>((t + 1) * row));
      const Results alone = run(one, own, {});
      EXPECT_EQ(std::memcmp(alone.y.data(), all.y.data() + t * row, row), 0) << t;
      EXPECT_EQ(std::memcmp(alone.dx.data(), all.dx.data() + t * row, row), 0) << t;
      EXPECT_EQ(std::memcmp(alone.dweights.data(), all.dweights.data() + t * shape.slots * 4,
                            shape.slots * 4),
                0)
          << t;
    }
  }
}

TEST(Experts, FewAndManySlots) {
  LayerShape shape;
  shape.rank1 = shape.rank2 = 2;
  shape.biases = true;
  shape.format = "mxfp4";
  shape.hidden = 64;
  shape.inner = 32;
  for (const std::size_t tokens : {0u, 1u, 70u})
    for (const std::size_t slots : {0u, 1u, 4u}) {
      shape.tokens = tokens;
      shape.slots = slots;
      SCOPED_TRACE(std::to_string(tokens) + " tokens, slots " + std::to_string(slots));
      compare(Layer(shape, 13));
      // All to one expert, none to any, numbers far outside.
      for (const std::int64_t id : {std::int64_t{2}, std::int64_t{-1}, INT64_MAX, INT64_MIN}) {
        Layer layer(shape, 14);
        std::fill(layer.ids.begin(), layer.ids.end(), id);
        compare(layer);
      }
    }
}

// Whoever touched the bytes of an expert without rows would be ended.
TEST(Experts, ExpertsWithoutRowsAreNotTouched) {
  LayerShape shape;
  shape.format = "mxfp4";
  shape.experts = 4;  // the last one gets no rows
  shape.hidden = 128;
  shape.inner = 64;
  shape.rank1 = shape.rank2 = 2;
  Layer layer(shape, 19);
  std::replace(layer.ids.begin(), layer.ids.end(), std::int64_t{1}, std::int64_t{0});
  const Bytes dy = stored(shape.dtype, layer.normal(shape.tokens * shape.hidden, 1.0));
  const Results want = run(layer, dy, {});
  std::vector<std::pair<void*, std::size_t>> mapped;
  for (auto [stack, projection] :
       {std::pair(&layer.up, &layer.problem.up), std::pair(&layer.down, &layer.problem.down)}) {
    const std::size_t bytes = stack->packed->values.size(), each = bytes / shape.experts;
    ASSERT_EQ(each % 4096, 0u);
    void* const values =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(values, MAP_FAILED);
    mapped.emplace_back(values, bytes);
    std::memcpy(values, stack->packed->values.data(), bytes);
    for (const std::size_t e : {1u, 3u})
      ASSERT_EQ(mprotect(static_cast<std::uint8_t*>(values) + e * each, each, PROT_NONE), 0);
    projection->weight.first.values = static_cast<const std::uint8_t*>(values);
  }
  EXPECT_EQ(run(layer, dy, {false, true, 2}), want);
  for (const auto& [data, bytes] : mapped) munmap(data, bytes);
}

// So many slots that the last product is made strip by strip.
TEST(Experts, StripsOfAWideResult) {
  LayerShape shape;
  shape.tokens = 4500;
  shape.slots = 8;
  shape.hidden = 600;
  shape.inner = 8;
  shape.experts = 3;
  Layer layer(shape, 15);
  const Bytes dy = stored(shape.dtype, layer.normal(shape.tokens * shape.hidden, 1.0));
  const Results all = run(layer, dy, {false, true, 2});
  const std::size_t row = shape.hidden * 2, last = shape.tokens - 1;
  layer.problem.tokens = layer.problem.x.rows = 1;
  layer.problem.x.data = layer.x.data() + last * row;
  layer.problem.ids += last * shape.slots;
  layer.problem.weights = layer.weights.data() + last * shape.slots * 4;
  const Results alone =
      run(layer, Bytes(dy.end() - static_cast<std::ptrdiff_t>(row), dy.end()), {});
  EXPECT_EQ(std::memcmp(alone.y.data(), all.y.data() + last * row, row), 0);
  EXPECT_EQ(std::memcmp(alone.dx.data(), all.dx.data() + last * row, row), 0);
}

TEST(Experts, ElementwiseWorkHasTheSameBitsOnEverySet) {
  for (const ByDType key : every_dtype()) {
    LayerShape shape;
    Layer layer(shape, 17);
    constexpr std::size_t kInner = 83;
    const Bytes pre = stored(key.dtype, layer.normal(2 * kInner, 2.0));
    const Bytes dh = stored(key.dtype, layer.normal(kInner, 1.0));
    for (std::size_t a = 0; a < kExpertsActivations; ++a)
      for (const bool interleaved : {false, true}) {
        Bytes first_h, first_dpre;
        float first_dot = 0;
        for (const auto& variant : experts_variants()) {
          if (variant.isa > best_isa() || variant.dtype != key.dtype) continue;
          Bytes h(dh.size()), dpre(pre.size());
          ActivationJob job = {static_cast<ExpertsActivation>(a),
                               interleaved,
                               1.702f,
                               1.25f,
                               kInner,
                               pre.data(),
                               h.data(),
                               dh.data(),
                               dpre.data(),
                               0.75f};
          variant.run->activate(job);
          const float dot = variant.run->activate_back(job);
          // h once more, over dh.
          Bytes in_place = dh;
          ActivationJob over = job;
          over.h = in_place.data();
          over.dh = in_place.data();
          EXPECT_EQ(variant.run->activate_back(over), dot) << name_of(variant.isa);
          Bytes alone(dh.size());
          over.h = alone.data();
          variant.run->activate(over);
          EXPECT_EQ(in_place, alone) << name_of(variant.isa);
          if (first_h.empty()) {
            first_h = h;
            first_dpre = dpre;
            first_dot = dot;
          }
          EXPECT_EQ(h, first_h) << name_of(variant.isa);
          EXPECT_EQ(dpre, first_dpre) << name_of(variant.isa);
          EXPECT_EQ(dot, first_dot) << name_of(variant.isa);
        }
      }
  }
}

TEST(Routing, SortsByExpertAndKeepsTheOrderOfSlots) {
  const std::int64_t ids[] = {2, 0, 7, 2, -1, 0, 2, 1LL << 40};
  ExpertsProblem problem;
  problem.experts = 4;
  problem.tokens = 4;
  problem.slots = 2;
  problem.ids = ids;
  const Routing routing = sort_slots(problem);
  EXPECT_EQ(routing.active, (std::vector<std::uint32_t>{0, 2}));
  EXPECT_EQ(routing.offsets, (std::vector<std::uint32_t>{0, 2, 5}));
  EXPECT_EQ(routing.slots, (std::vector<std::uint32_t>{1, 5, 0, 3, 6}));
  EXPECT_EQ(routing.tokens, (std::vector<std::uint32_t>{0, 2, 0, 1, 3}));
  constexpr std::uint32_t kNo = kSkippedRow;
  EXPECT_EQ(routing.places, (std::vector<std::uint32_t>{2, 0, kNo, 3, kNo, 1, 4, kNo}));
}

}  // namespace
}  // namespace monograph
