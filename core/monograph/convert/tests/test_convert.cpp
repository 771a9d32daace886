#include <gtest/gtest.h>

#include <cmath>

#include "monograph/convert/convert.h"
#include "monograph/files/tests/temporary_folder.h"
#include "monograph/quant_methods/list_weights.h"
#include "monograph/quant_methods/skip_reason.h"
#include "monograph/quant_methods/tests/tensor_list.h"
#include "monograph/weights/composed_weight.h"

namespace monograph {
namespace {

using files::error_of;
using files::TemporaryFolder;
using safetensors::Checkpoint;
using safetensors::ShardedWriter;
using safetensors::StoredDType;

// A few values of every size, from a fixed sequence.
template <class T>
std::string numbers(std::size_t count, float spread = 1.0f) {
  std::vector<T> values(count);
  std::uint32_t state = 12345;
  for (T& value : values) {
    state = state * 1664525 + 1013904223;
    value = from_float<T>((static_cast<float>(state >> 8) * 0x1p-23f - 1.0f) * spread);
  }
  return bytes_of(values.data(), count);
}

// More than one piece, a tail that is no block, an odd count, every float type.
TensorList source() {
  TensorList list;
  list.add("a.weight", StoredDType::kBF16, {3, 1398103}, numbers<Bf16>(3 * 1398103));
  list.add("b.weight", StoredDType::kF32, {7, 33}, numbers<float>(7 * 33, 30.0f));
  list.add("c.weight", StoredDType::kF16, {64, 128}, numbers<Fp16>(64 * 128, 0.01f));
  list.add("d.bias", StoredDType::kBF16, {5}, numbers<Bf16>(5));
  list.add("e.weight", StoredDType::kBF16, {0, 4});
  return list;
}

struct Result {
  TemporaryFolder folder;
  Checkpoint checkpoint;
  std::vector<Weight> weights;
};

std::unique_ptr<Result> run(const std::vector<Conversion>& conversions, int threads,
                            std::uint64_t shard_bytes = UINT64_MAX) {
  auto result = std::make_unique<Result>();
  std::vector<safetensors::TensorSpec> specs;
  for (const Conversion& conversion : conversions) {
    for (auto& spec : specs_of(conversion)) specs.push_back(spec);
  }
  ShardedWriter writer(result->folder.path(),
                       safetensors::plan_shards(specs, {{"format", "pt"}}, shard_bytes));
  ConvertOptions options;
  options.threads = threads;
  std::atomic<std::uint64_t> advanced = 0;
  options.advance = [&](std::uint64_t bytes) { advanced += bytes; };
  convert(conversions, writer, options);
  std::uint64_t expected = 0;
  for (const Conversion& conversion : conversions) expected += source_bytes(conversion);
  EXPECT_EQ(advanced, expected);
  writer.finish();
  result->checkpoint = Checkpoint::open(result->folder.path());
  result->weights = list_weights(result->checkpoint);
  return result;
}

class Convert : public testing::Test {
 protected:
  void SetUp() override { open(source()); }
  void open(const TensorList& list) {
    files::write_all(folder_ / "model.safetensors", list.file());
    checkpoint_ = Checkpoint::open(folder_.path());
    weights_ = list_weights(checkpoint_);
  }
  std::vector<Conversion> all(Conversion pattern) const {
    std::vector<Conversion> list;
    for (const Weight& weight : weights_) {
      Conversion conversion = pattern;
      conversion.weight = &weight;
      if (weight.name.ends_with("bias")) conversion.action = Action::kCopy;
      list.push_back(conversion);
    }
    return list;
  }
  TemporaryFolder folder_;
  Checkpoint checkpoint_;
  std::vector<Weight> weights_;
};

std::vector<float> floats(const Weight& weight) {
  std::vector<float> out(weight.elements);
  read_elements(weight, 0, weight.elements, DType::kFloat32, out.data());
  return out;
}

TEST_F(Convert, QuantisesEachWeightAsTheKernelDoesTheWhole) {
  Conversion pattern;
  pattern.action = Action::kQuantize;
  for (const Format format : {Format::kNf4, Format::kFp4}) {
    for (const bool double_quant : {false, true}) {
      pattern.format = format;
      pattern.block = double_quant ? 64 : 4096;
      pattern.double_quant = double_quant;
      const auto result = run(all(pattern), 3);
      ASSERT_EQ(result->weights.size(), weights_.size());
      for (std::size_t i = 0; i < weights_.size(); ++i) {
        const Weight& from = weights_[i];
        const Weight& to = result->weights[i];
        EXPECT_EQ(to.name, from.name);
        EXPECT_EQ(to.shape, from.shape);
        EXPECT_EQ(to.dtype, from.dtype);
        if (from.name.ends_with("bias")) continue;
        EXPECT_EQ(to.double_quant, double_quant);
        std::vector<std::uint8_t> values((from.elements + 1) / 2);
        std::vector<float> scales(ceil_div(from.elements, pattern.block));
        const std::vector<float> input = floats(from);
        const QuantizeJob job = {format,        DType::kFloat32,
                                 input.data(),  input.size(),
                                 pattern.block, NonFinite::kError,
                                 values.data(), reinterpret_cast<std::uint8_t*>(scales.data())};
        ASSERT_EQ(quantize(job, serial_for), std::nullopt);
        const auto stored_values = to.parts.front().tensor.bytes();
        EXPECT_TRUE(std::equal(values.begin(), values.end(), stored_values.begin()));
        if (double_quant) continue;
        const auto absmax = to.parts[2].tensor.bytes();
        ASSERT_EQ(absmax.size(), 4 * scales.size());
        if (!scales.empty()) EXPECT_EQ(std::memcmp(absmax.data(), scales.data(), absmax.size()), 0);
      }
    }
  }
}

TEST_F(Convert, GivesTheSameBytesForAnyNumberOfThreads) {
  Conversion pattern;
  pattern.action = Action::kQuantize;
  pattern.double_quant = true;
  const auto one = run(all(pattern), 1);
  for (const int threads : {2, 5}) {
    const auto more = run(all(pattern), threads);
    EXPECT_EQ(files::read_all(one->folder / "model.safetensors"),
              files::read_all(more->folder / "model.safetensors"));
  }
}

// Pieces of one weight wait for the largest magnitude of all.
TEST_F(Convert, QuantisesToSmallFloatsTheSameForAnyNumberOfThreads) {
  TensorList list;
  list.add("a.weight", StoredDType::kBF16, {2100, 4096}, numbers<Bf16>(2100 * 4096));
  list.add("b.weight", StoredDType::kF32, {7, 32}, numbers<float>(7 * 32, 30.0f));
  list.add("c.weight", StoredDType::kBF16, {0, 32});
  open(list);
  for (const Format format :
       {Format::kMxfp4, Format::kMxfp8, Format::kNvfp4Divide, Format::kFp8Block}) {
    Conversion pattern;
    pattern.action = Action::kQuantize;
    pattern.format = format;
    pattern.block = find_format(format)->smallest_block;
    const auto one = run(all(pattern), 1), more = run(all(pattern), 3);
    EXPECT_EQ(files::read_all(one->folder / "model.safetensors"),
              files::read_all(more->folder / "model.safetensors"));
    ASSERT_EQ(one->weights.size(), 3u);
    const double allowed = find_format(format)->bits == 8 ? 0.04 : 0.15;
    for (std::size_t i = 0; i < 2; ++i) {
      double error = 0, all_of_it = 0;
      const std::vector<float> from = floats(weights_[i]), to = floats(one->weights[i]);
      for (std::size_t j = 0; j < from.size(); ++j) {
        error += (from[j] - to[j]) * (from[j] - to[j]);
        all_of_it += from[j] * from[j];
      }
      EXPECT_LT(std::sqrt(error / all_of_it), allowed) << one->weights[i].format;
    }
  }
}

// Matrices of several pieces, the last one smaller; a scale of its own in each.
TEST_F(Convert, AStackOfExpertsHasTheBytesOfItsMatrices) {
  constexpr std::size_t kRows = 1100, kCols = 4096, kMatrix = kRows * kCols;
  const std::string one = numbers<Bf16>(kMatrix), two = numbers<Bf16>(kMatrix, 7.0f);
  TensorList list;
  list.add("a.weight", StoredDType::kBF16, {kRows, kCols}, one);
  list.add("b.weight", StoredDType::kBF16, {kRows, kCols}, two);
  list.add("m.experts.gate_up_proj", StoredDType::kBF16, {2, kRows, kCols}, one + two);
  open(list);
  // The same elements as [experts, inputs, outputs] give the same bytes.
  const Weight transposed_twice = transposed(transposed(weights_[2]));
  for (const Format format :
       {Format::kNf4, Format::kMxfp4, Format::kMxfp8, Format::kNvfp4Divide, Format::kFp8Block}) {
    Conversion pattern;
    pattern.action = Action::kQuantize;
    pattern.format = format;
    pattern.block = format == Format::kNf4 ? 64 : find_format(format)->smallest_block;
    std::vector<Conversion> conversions = all(pattern);
    conversions[2].stack = Stack::kOwn;
    const auto stored = run(conversions, 3);
    conversions = {conversions[2]};
    conversions[0].weight = &transposed_twice;
    const auto of_transposed = run(conversions, 2);
    ASSERT_EQ(stored->weights.size(), 3u);
    const Weight& stack = stored->weights[2];
    EXPECT_EQ(stack.shape, (std::vector<std::uint64_t>{2, kRows, kCols}));
    const std::vector<float> first = floats(stored->weights[0]),
                             second = floats(stored->weights[1]);
    const std::vector<float> both = floats(stack);
    EXPECT_TRUE(std::equal(first.begin(), first.end(), both.begin())) << stack.format;
    EXPECT_TRUE(std::equal(second.begin(), second.end(), both.begin() + kMatrix)) << stack.format;
    ASSERT_EQ(of_transposed->weights[0].parts.size(), stack.parts.size());
    for (std::size_t i = 0; i < stack.parts.size(); ++i) {
      const auto x = stack.parts[i].tensor.bytes(),
                 y = of_transposed->weights[0].parts[i].tensor.bytes();
      EXPECT_TRUE(std::equal(x.begin(), x.end(), y.begin(), y.end())) << stack.parts[i].role;
    }
  }
}

TEST_F(Convert, WhatAdvanceThrowsWhilePiecesWaitEndsTheWork) {
  TensorList list;
  list.add("a.weight", StoredDType::kBF16, {2100, 4096}, numbers<Bf16>(2100 * 4096));
  open(list);
  Conversion pattern;
  pattern.action = Action::kQuantize;
  pattern.format = Format::kNvfp4Divide;
  pattern.block = 16;
  const std::vector<Conversion> conversions = all(pattern);
  const TemporaryFolder folder;
  ShardedWriter writer(folder.path(),
                       safetensors::plan_shards(specs_of(conversions[0]), {}, 1 << 30));
  ConvertOptions options;
  options.threads = 3;
  options.advance = [](std::uint64_t) { throw Error("enough"); };
  EXPECT_EQ(error_of([&] { convert(conversions, writer, options); }), "enough");
}

TEST_F(Convert, CastsWithOneRoundingAndDecodesWhatIsPacked) {
  Conversion pattern;
  pattern.action = Action::kCast;
  pattern.dtype = DType::kFloat32;
  const auto wide = run(all(pattern), 2, /*shard_bytes=*/1 << 20);
  EXPECT_GT(wide->checkpoint.files().size(), 1u);
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    EXPECT_EQ(floats(wide->weights[i]), floats(weights_[i]));
  }
  pattern.action = Action::kQuantize;
  const auto packed = run(all(pattern), 2);
  std::vector<Conversion> back;
  for (const Weight& weight : packed->weights) {
    Conversion conversion;
    conversion.weight = &weight;
    conversion.action = Action::kCast;
    conversion.dtype = DType::kFloat32;
    back.push_back(conversion);
  }
  const auto decoded = run(back, 2);
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    EXPECT_EQ(floats(decoded->weights[i]), floats(packed->weights[i]));
  }
}

TEST_F(Convert, NamesTheElementThatCannotBeStored) {
  std::vector<float> values(5000, 1.0f);
  values[4999] = 70000.0f;
  TensorList list;
  list.add("x.weight", StoredDType::kF32, {5, 1000}, bytes_of(values.data(), values.size()));
  open(list);
  Conversion pattern;
  pattern.action = Action::kCast;
  pattern.dtype = DType::kFloat16;
  EXPECT_NE(error_of([&] { run(all(pattern), 2); }).find("'x.weight': element 4999 is 70000"),
            std::string::npos);
  values[4999] = 1.0f;
  values[123] = NAN;
  TensorList other;
  other.add("x.weight", StoredDType::kF32, {5, 1000}, bytes_of(values.data(), values.size()));
  open(other);
  pattern.action = Action::kQuantize;
  EXPECT_NE(error_of([&] { run(all(pattern), 2); }).find("element 123 is nan"), std::string::npos);
  pattern.nonfinite = NonFinite::kSaturate;
  EXPECT_EQ(error_of([&] { run(all(pattern), 2); }), "no error");
}

TEST_F(Convert, WhatAdvanceThrowsEndsTheWorkAndLeavesNoFile) {
  const TemporaryFolder folder;
  Conversion pattern;
  pattern.action = Action::kCopy;
  const std::vector<Conversion> conversions = all(pattern);
  std::vector<safetensors::TensorSpec> specs;
  for (const Conversion& conversion : conversions) {
    for (auto& spec : specs_of(conversion)) specs.push_back(spec);
  }
  {
    ShardedWriter writer(folder.path(), safetensors::plan_shards(specs, {}, UINT64_MAX));
    ConvertOptions options;
    options.threads = 3;
    options.advance = [](std::uint64_t) { throw Error("stop"); };
    EXPECT_EQ(error_of([&] { convert(conversions, writer, options); }), "stop");
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(WhyKept, ChoosesLinearLayersOnly) {
  const auto why = [](const std::string& name, std::vector<std::uint64_t> shape) {
    Weight weight;
    weight.name = name;
    weight.quant_method = "plain";
    weight.shape = std::move(shape);
    return skip_reason(weight);
  };
  EXPECT_EQ(why("model.layers.0.mlp.up_proj.weight", {8, 8}), "");
  EXPECT_EQ(why("model.layers.0.mlp.gate_proj.weight", {8, 8}), "");
  EXPECT_EQ(why("bert.encoder.layer.0.output.dense.weight", {8, 8}), "");
  EXPECT_EQ(why("model.layers.0.attention.output.weight", {8, 8}), "");
  EXPECT_EQ(why("model.embed_tokens.weight", {8, 8}), "embedding");
  EXPECT_EQ(why("transformer.wte.weight", {8, 8}), "embedding");
  EXPECT_EQ(why("lm_head.weight", {8, 8}), "output head");
  EXPECT_EQ(why("model.language_model.lm_head.weight", {8, 8}), "output head");
  EXPECT_EQ(why("score.weight", {8, 8}), "output head");
  EXPECT_EQ(why("model.layers.0.mlp.gate.weight", {8, 8}), "router");
  EXPECT_EQ(why("model.layers.0.mlp.experts.3.up_proj.weight", {8, 8}), "expert");
  EXPECT_EQ(why("model.norm.weight", {8}), "not a matrix");
  EXPECT_EQ(why("model.layers.0.mlp.experts.gate_up_proj", {2, 8, 8}), "not a matrix");
  EXPECT_EQ(error_of([] {
              check_orientation(json::parse(R"({"model_type": "gpt2"})", "x"));
            }).find("config.json: model_type 'gpt2'"),
            0u);
}

}  // namespace
}  // namespace monograph
