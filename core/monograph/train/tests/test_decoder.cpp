#include <gtest/gtest.h>

#include "monograph/base/float_types.h"
#include "monograph/cpu/isa.h"
#include "monograph/kernels/linear/linear.h"
#include "monograph/kernels/rms_norm/rms_norm.h"
#include "monograph/kernels/varlen_attention/unit.h"
#include "monograph/train/decoder.h"
#include "monograph/train/tests/tiny_model.h"

namespace monograph::train {
namespace {

using Ids = std::vector<std::int64_t>;
using Logits = std::vector<float>;

const Workers kAlone = {serial_for, 1};

struct Family {
  const char* name;
  std::string config;
  bool head_norms = false, branch_norms = false;
};
const Family kFamilies[] = {
    {"llama", R"("model_type": "llama")"},
    {"mistral", R"("model_type": "mistral", "sliding_window": 5)"},
    {"qwen3", R"("model_type": "qwen3")", true},
    {"gemma3_text",
     R"("model_type": "gemma3_text", "sliding_window": 5, "tie_word_embeddings": false,
        "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16)",
     true, true},
};

// Few queries are then served by vector code, whose bits are others.
bool few_queries_differ(DType dtype) {
  return best_row(varlen_attention_variants(), best_isa(), ByDType{dtype})->run->few == nullptr;
}

// The logits behind the last of `ids`, given in pieces of these sizes, the last size again and
// again.
Logits in_pieces(const BaseModel& base, const LoraParameters& parameters, const Ids& ids,
                 const std::vector<std::size_t>& sizes, const Workers& workers = kAlone) {
  Decoder decoder(base, parameters, workers);
  std::span<const float> logits;
  const std::span<const std::int64_t> all(ids);
  for (std::size_t begin = 0, piece = 0; begin < ids.size(); ++piece) {
    const std::size_t size = std::min(sizes[std::min(piece, sizes.size() - 1)], ids.size() - begin);
    logits = decoder.append(all.subspan(begin, size));
    begin += size;
  }
  EXPECT_EQ(decoder.tokens(), ids.size());
  return {logits.begin(), logits.end()};
}

// The same by the layers of the trained model, without a past.
Logits without_a_past(const BaseModel& base, const LoraParameters& parameters, const Ids& ids) {
  Batch batch;
  batch.rows = 1;
  batch.length = ids.size();
  batch.ids = ids;
  batch.offsets = {0, static_cast<std::int32_t>(ids.size())};
  for (std::size_t i = 0; i < ids.size(); ++i)
    batch.positions.push_back(static_cast<std::int64_t>(i));
  const DType dtype = base.dtype();
  const std::size_t width = base.config().width;
  Activations h(dtype, ids.size(), width), next(dtype, ids.size(), width);
  const Angles angles(base, batch, kAlone);
  base.embed(ids, h.data());
  for (std::size_t i = 0; i < base.layers().size(); ++i) {
    Layer layer(base, parameters, i);
    layer.round_factors(parameters.values, kAlone);
    LayerKept kept(base, ids.size());
    layer.forward(h, batch, angles, kept, &next, {}, kAlone);
    std::swap(h, next);
  }
  Activations normed(dtype, ids.size(), width), logits(dtype, ids.size(), kTinyVocabulary);
  rms_norm({dtype, dtype, base.config().norm_rounding, ids.size(), width, h.data(), width, nullptr,
            width, base.final_norm().data(), base.config().eps, nullptr, normed.data()},
           serial_for);
  const LinearOutput output = {base.head(), {}, nullptr, logits.out()};
  linear(dtype, normed.in(), {&output, 1}, serial_for);
  Logits last;
  with_type(dtype, [&]<class T>() {
    const T* const from = static_cast<const T*>(logits.data()) + logits.size() - kTinyVocabulary;
    for (std::size_t i = 0; i < kTinyVocabulary; ++i) last.push_back(to_float(from[i]));
  });
  return last;
}

TEST(Decoder, TheSameBitsHoweverTheTokensCome) {
  const Ids ids = TinyModel::ids(37);
  for (const Family& family : kFamilies) {
    const TinyModel model(family.config, family.head_norms, family.branch_norms);
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      SCOPED_TRACE(std::string(family.name) + " " + name_of(dtype));
      const BaseModel base(model.folder(), dtype);
      const LoraParameters parameters = TinyModel::adapter(base);
      const Logits want = without_a_past(base, parameters, ids);
      EXPECT_EQ(in_pieces(base, parameters, ids, {37}), want);
      EXPECT_EQ(in_pieces(base, parameters, ids, {9, 12, 6, 10}), want);
      if (few_queries_differ(dtype)) continue;
      EXPECT_EQ(in_pieces(base, parameters, ids, {1}), want);
      EXPECT_EQ(in_pieces(base, parameters, ids, {30, 1}), want);
      EXPECT_EQ(in_pieces(base, parameters, ids, {2, 3, 20, 1, 4}), want);
    }
  }
}

TEST(Decoder, TheSameBitsForAnyNumberOfThreads) {
  const TinyModel model(R"("model_type": "llama")");
  const Ids ids = TinyModel::ids(37);
  ThreadPool pool(3);
  const auto each = [&](std::size_t count, std::size_t grain, ParallelBody body) {
    pool.parallel_for(count, grain, body);
  };
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const BaseModel base(model.folder(), dtype);
    const LoraParameters parameters = TinyModel::adapter(base);
    for (const std::vector<std::size_t>& sizes : {std::vector<std::size_t>{30, 1}, {37}})
      EXPECT_EQ(in_pieces(base, parameters, ids, sizes, {each, pool.threads()}),
                in_pieces(base, parameters, ids, sizes));
  }
}

TEST(Decoder, ALongPromptIsTakenInPieces) {
  const TinyModel model(R"("model_type": "llama")");
  const BaseModel base(model.folder(), DType::kFloat32);
  const LoraParameters parameters = TinyModel::adapter(base);
  const Ids ids = TinyModel::ids(600);
  const Logits want = without_a_past(base, parameters, ids);
  EXPECT_EQ(in_pieces(base, parameters, ids, {600}), want);
  EXPECT_EQ(in_pieces(base, parameters, ids, {590, 1}), want);
}

TEST(Decoder, WithoutAnAdapterTheBaseAnswers) {
  const TinyModel model(R"("model_type": "llama")");
  const BaseModel base(model.folder(), DType::kFloat32);
  const Ids ids = TinyModel::ids(9);
  const Logits alone = in_pieces(base, {}, ids, {9});
  EXPECT_EQ(alone, without_a_past(base, {}, ids));
  EXPECT_NE(alone, in_pieces(base, TinyModel::adapter(base), ids, {9}));
}

TEST(Decoder, WhatIsForgottenChangesNothing) {
  const TinyModel model(R"("model_type": "mistral", "sliding_window": 5)");
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const BaseModel base(model.folder(), dtype);
    const LoraParameters parameters = TinyModel::adapter(base);
    Decoder decoder(base, parameters, kAlone);
    decoder.append(TinyModel::ids(300));
    for (const std::size_t size : {37, 300, 1}) {
      decoder.forget();
      EXPECT_EQ(decoder.tokens(), 0u);
      const Ids ids = TinyModel::ids(size);
      const std::span<const float> logits = decoder.append(ids);
      EXPECT_EQ(Logits(logits.begin(), logits.end()), in_pieces(base, parameters, ids, {size}));
    }
  }
}

TEST(Decoder, WhatCannotBeAppendedChangesNothing) {
  const TinyModel model(R"("model_type": "llama")");
  const BaseModel base(model.folder(), DType::kFloat32);
  Decoder decoder(base, {}, kAlone);
  const Ids ids = TinyModel::ids(9);
  decoder.append(std::span(ids).first(4));
  const auto error = [&](const Ids& wrong) {
    return files::error_of([&] { decoder.append(wrong); });
  };
  EXPECT_EQ(error({}), "there is no token, wanted one or more");
  EXPECT_EQ(error({1, 61}), "token 61: wanted 0 to 60, the vocabulary of the base");
  EXPECT_EQ(error({-1}), "token -1: wanted 0 to 60, the vocabulary of the base");
  EXPECT_EQ(error(Ids(697)), "701 tokens, wanted 700 at most, max_position_embeddings of the base");
  EXPECT_EQ(decoder.tokens(), 4u);
  const std::span<const float> logits = decoder.append(std::span(ids).subspan(4));
  EXPECT_EQ(Logits(logits.begin(), logits.end()), without_a_past(base, {}, ids));
}

}  // namespace
}  // namespace monograph::train
