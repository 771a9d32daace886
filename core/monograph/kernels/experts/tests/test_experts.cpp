// Values and gradients of layers of experts against double, over formats, activations, layouts,
// biases and low-rank parts; bits over threads, batches, and against dequantised weights.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <vector>

#include "monograph/kernels/experts/kernels.h"
#include "monograph/kernels/experts/routing.h"
#include "monograph/kernels/experts/tests/compare_with_double.h"
#include "monograph/kernels/linear/products.h"

namespace monograph {
namespace {

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
