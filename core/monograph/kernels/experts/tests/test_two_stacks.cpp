// Gate and up of the first product as two stacks: values against double, and the bits of one stack.
#include "monograph/base/error.h"
#include "monograph/formats/tests/ggml_weight.h"
#include "monograph/kernels/experts/tests/compare_with_double.h"

namespace monograph {
namespace {

// A stack of random blocks of ggml's, and its elements in the type of x.
struct GgmlStack {
  GgmlWeight rows;  // of all experts
  Bytes plain;
  PackedGrids grids;

  GgmlStack(const char* format, const LayerShape& s, unsigned seed)
      : rows(random_ggml(*find_format(format), s.experts * s.inner, s.hidden, seed)),
        plain(rows.rows * rows.cols * size_bytes(s.dtype)) {
    dequantize(rows.view, s.dtype, plain.data(), serial_for);
    const std::size_t shape[] = {s.experts, s.inner, s.hidden};
    grids = bind_grids(*rows.info, rows.info->largest_block, shape, s.inner,
                       {rows.bytes.data(), rows.bytes.size()}, {});
  }
};

// Of each piece, an expert or a row, the first part's share and then the second's.
Bytes joined(const Bytes& first, const Bytes& second, std::size_t pieces) {
  Bytes all;
  const auto add = [&](const Bytes& from, std::size_t piece) {
    const std::size_t each = from.size() / pieces;
    const auto begin = from.begin() + static_cast<std::ptrdiff_t>(piece * each);
    all.insert(all.end(), begin, begin + static_cast<std::ptrdiff_t>(each));
  };
  for (std::size_t piece = 0; piece < pieces; ++piece) {
    add(first, piece);
    add(second, piece);
  }
  return all;
}

TEST(TwoStacks, OfBlocksThatHoldTheirScales) {
  using Pair = std::pair<const char*, const char*>;
  unsigned seed = 80;
  for (const auto& [first, second] :
       {Pair("q8_0", "q8_0"), Pair("q4_0", "q5_1"), Pair("q4_k", "q4_k"), Pair("q4_k", "q6_k"),
        Pair("ggml_mxfp4", "ggml_mxfp4")})
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      LayerShape shape;
      shape.dtype = dtype;
      shape.hidden = 256;
      shape.inner = 37;
      shape.rank1 = 3;
      shape.biases = seed % 2 == 0;
      SCOPED_TRACE(std::string(first) + " " + second + " " + shape.name());
      Layer layer(shape, seed++);
      const GgmlStack gate(first, shape, seed++), up(second, shape, seed++);
      layer.up.plain = joined(gate.plain, up.plain, shape.experts);
      layer.up.dense = loaded(dtype, layer.up.plain);
      layer.problem.up.weight = gate.grids;
      layer.problem.up.up_half = up.grids;
      compare(layer);
      const Bytes dy = stored(dtype, layer.normal(shape.tokens * shape.hidden, 1.0));
      const Results apart = run(layer, dy, {});
      layer.problem.up.up_half.reset();
      if (first == second) {
        const Bytes bytes = joined(gate.rows.bytes, up.rows.bytes, shape.experts);
        const std::size_t whole[] = {shape.experts, 2 * shape.inner, shape.hidden};
        layer.problem.up.weight = bind_grids(*gate.rows.info, gate.rows.info->largest_block, whole,
                                             2 * shape.inner, {bytes.data(), bytes.size()}, {});
        EXPECT_EQ(run(layer, dy, {}), apart) << "packed";
      }
      layer.use_plain();
      EXPECT_EQ(run(layer, dy, {}), apart) << "plain";
    }
}

// gpt-oss: rows of gate and up alternate, in biases and factors too.
TEST(TwoStacks, RowsThatAlternate) {
  unsigned seed = 140;
  for (const char* format : {"ggml_mxfp4", "q8_0", "q4_k"})
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      LayerShape shape;
      shape.dtype = dtype;
      shape.hidden = 256;
      shape.inner = 37;
      shape.activation = ExpertsActivation::kClampedGlu;
      shape.interleaved = shape.biases = true;
      shape.rank1 = 3;
      SCOPED_TRACE(std::string(format) + " " + shape.name());
      Layer layer(shape, seed++);
      const GgmlStack gate(format, shape, seed++), up(format, shape, seed++);
      const std::size_t rows = shape.experts * shape.inner;
      layer.up.plain = joined(gate.plain, up.plain, rows);
      layer.up.dense = loaded(dtype, layer.up.plain);
      layer.problem.up.weight = alternating(gate.grids, up.grids);
      compare(layer);
      const Bytes dy = stored(dtype, layer.normal(shape.tokens * shape.hidden, 1.0));
      const Results apart = run(layer, dy, {});
      const Bytes bytes = joined(gate.rows.bytes, up.rows.bytes, rows);
      const std::size_t whole[] = {shape.experts, 2 * shape.inner, shape.hidden};
      layer.problem.up.weight = bind_grids(*gate.rows.info, gate.rows.info->largest_block, whole,
                                           2 * shape.inner, {bytes.data(), bytes.size()}, {});
      EXPECT_EQ(run(layer, dy, {}), apart) << "packed";
      layer.use_plain();
      EXPECT_EQ(run(layer, dy, {}), apart) << "plain";
    }
}

TEST(TwoStacks, ThatCannotAlternateAreNamed) {
  LayerShape shape;
  shape.hidden = 256;
  const GgmlStack gate("q4_k", shape, 1), up("q5_k", shape, 2);
  shape.inner = 36;
  const GgmlStack shorter("q4_k", shape, 3);
  const auto message = [](const PackedGrids& even, const PackedGrids& odd) -> std::string {
    try {
      alternating(even, odd);
    } catch (const Error& error) {
      return error.what();
    }
    return "none";
  };
  EXPECT_EQ(message(gate.grids, up.grids),
            "rows of q4_k and of q5_k cannot alternate, wanted one format of ggml's blocks");
  EXPECT_EQ(message(gate.grids, shorter.grids),
            "stacks of 5 x 37 x 256 and 5 x 36 x 256 cannot alternate, wanted both alike");
  EXPECT_EQ(message(alternating(gate.grids, gate.grids), gate.grids),
            "stacks of 5 x 74 x 256 and 5 x 37 x 256 cannot alternate, wanted both alike");
  PackedGrids plain;
  EXPECT_EQ(message(plain, plain),
            "rows of plain and of plain cannot alternate, wanted one format of ggml's blocks");
}

TEST(TwoStacks, WithScalesOfTheirOwn) {
  LayerShape shape;
  shape.hidden = 96;
  shape.inner = 37;
  shape.activation = ExpertsActivation::kClampedGlu;
  shape.rank1 = 2;
  Layer layer(shape, 120);
  const auto half = [&](unsigned seed) {
    return small_weight("mxfp4", ScaleKind::kE8m0, 32, false,
                        {shape.experts, shape.inner, shape.hidden}, seed);
  };
  const SmallWeight gate = half(121), up = half(122);
  Bytes values[2];
  for (const SmallWeight* stack : {&gate, &up}) {
    Bytes& dense = values[stack == &up];
    dense.resize(shape.experts * shape.inner * shape.hidden * 2);
    dequantize(stack->view, shape.dtype, dense.data(), serial_for);
  }
  layer.up.plain = joined(values[0], values[1], shape.experts);
  layer.up.dense = loaded(shape.dtype, layer.up.plain);
  layer.problem.up.weight.first = gate.view;
  layer.problem.up.up_half.emplace();
  layer.problem.up.up_half->first = up.view;
  compare(layer);
  const Bytes dy = stored(shape.dtype, layer.normal(shape.tokens * shape.hidden, 1.0));
  const Results apart = run(layer, dy, {});
  layer.problem.up.up_half.reset();
  layer.use_plain();
  EXPECT_EQ(run(layer, dy, {}), apart);
}

}  // namespace
}  // namespace monograph
