#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>

#include "monograph/base/error.h"
#include "monograph/files/tests/temporary_folder.h"
#include "monograph/gguf/model_config.h"
#include "monograph/gguf/row_order.h"
#include "monograph/gguf/tokenizer.h"

namespace monograph::gguf {
namespace {

TEST(Gguf, RowsOfAHeadAreInterleavedOnce) {
  EXPECT_EQ(source_row(0, 8), 0u);
  EXPECT_EQ(source_row(1, 8), 4u);
  EXPECT_EQ(source_row(2, 8), 1u);
  EXPECT_EQ(source_row(15, 8), 15u);
  std::set<std::uint64_t> rows;
  for (std::uint64_t row = 0; row < 64; ++row) rows.insert(source_row(row, 16));
  EXPECT_EQ(rows.size(), 64u);
}

TEST(Gguf, NamesOfModules) {
  const Architecture& llama = *find_architecture("llama");
  const Architecture& gemma = *find_architecture("gemma3_text");
  EXPECT_EQ(matrix_name("model.layers.12.self_attn.q_proj"), "blk.12.attn_q");
  EXPECT_EQ(matrix_name("language_model.model.embed_tokens"), "token_embd");
  EXPECT_EQ(matrix_name("model.layers.x.self_attn.q_proj"), std::nullopt);
  EXPECT_EQ(matrix_name("model.layers.3.experts", "up"), "blk.3.ffn_up_exps");
  EXPECT_EQ(matrix_name("model.layers.3.input_layernorm"), std::nullopt);
  EXPECT_EQ(norm_name(llama, "model.layers.3.post_attention_layernorm"), "blk.3.ffn_norm");
  EXPECT_EQ(norm_name(gemma, "model.layers.3.post_attention_layernorm"),
            "blk.3.post_attention_norm");
  EXPECT_EQ(norm_name(gemma, "model.norm"), "output_norm");
  EXPECT_TRUE(is_other_modality("model.vision_tower.x.weight"));
  EXPECT_FALSE(is_other_modality("model.layers.0.mlp.up_proj.weight"));
}

TEST(Gguf, AFileIsHeaderPairsTensorsAndAlignedData) {
  const files::TemporaryFolder folder;
  Metadata metadata;
  metadata.add("a", std::uint32_t{7});
  std::vector<TensorInfo> tensors(2);
  tensors[0].name = "x";
  tensors[0].shape = {3};
  tensors[1].name = "y";
  tensors[1].type = TensorType::kQ8;
  tensors[1].shape = {2, 32};
  const FilePlan plan = plan_file(metadata, tensors);
  EXPECT_EQ(plan.tensors[1].offset_bytes, 32u);
  EXPECT_EQ(plan.tensors[1].size_bytes, 68u);
  EXPECT_EQ(plan.header.size() % 32, 0u);
  EXPECT_EQ(plan.size_bytes, plan.header.size() + 32 + 96);
  FileWriter writer(folder / "x.gguf", plan, {});
  const std::vector<std::uint8_t> bytes = {1, 2, 3};
  writer.write(1, 4, bytes);
  EXPECT_FALSE(std::filesystem::exists(folder / "x.gguf"));
  writer.finish();
  const std::string text = files::read_all(folder / "x.gguf");
  EXPECT_EQ(text.size(), plan.size_bytes);
  std::string wanted("GGUF\3\0\0\0\2\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0a\4\0\0\0\7", 38);
  EXPECT_EQ(text.substr(0, wanted.size()), wanted);
  EXPECT_EQ(text.substr(plan.header.size() + 36, 3), "\1\2\3");
}

// In builds without asserts too.
TEST(Gguf, AWriteOutsideItsTensorIsRefused) {
  const files::TemporaryFolder folder;
  TensorInfo tensor;
  tensor.name = "x";
  tensor.shape = {4};
  FileWriter writer(folder / "x.gguf", plan_file({}, {tensor}), {});
  const std::vector<std::uint8_t> bytes(8);
  writer.write(0, 8, bytes);
  EXPECT_THROW(writer.write(0, 9, bytes), Error);
  EXPECT_THROW(writer.write(0, 17, {}), Error);
  EXPECT_THROW(writer.write(0, std::uint64_t{0} - 4, bytes), Error);
  EXPECT_ANY_THROW(writer.write(1, 0, bytes));
  tensor.type = TensorType::kQ8;
  EXPECT_THROW(plan_file({}, {tensor}), Error);
  tensor.shape = {};
  EXPECT_THROW(plan_file({}, {tensor}), Error);
}

TEST(Gguf, NamesThatAreTooLongOrDoubleAreRefused) {
  std::vector<TensorInfo> tensors(2);
  for (TensorInfo& tensor : tensors) {
    tensor.name = "x";
    tensor.shape = {1};
  }
  EXPECT_THROW(plan_file({}, tensors), Error);
  tensors[1].name = std::string(64, 'y');
  EXPECT_THROW(plan_file({}, tensors), Error);
  tensors[1].name.pop_back();
  EXPECT_NO_THROW(plan_file({}, tensors));
}

// Gemma 3 4B as it is published: most settings are those that transformers has by itself.
TEST(Gguf, GemmaOfSeveralModalitiesHasTheDefaultsOfTransformers) {
  const json::Value json = json::parse(R"({"model_type": "gemma3", "text_config": {
    "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
    "num_hidden_layers": 34, "sliding_window": 1024,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}})",
                                       "test");
  const ModelConfig config = read_model_config(json, "test");
  EXPECT_EQ(config.heads, 8u);
  EXPECT_EQ(config.kv_heads, 4u);
  EXPECT_EQ(config.head_dim, 256u);
  EXPECT_EQ(config.vocabulary, 262208u);
  EXPECT_EQ(config.rope.theta, 1e6);
  EXPECT_EQ(config.rope.factor, 8);
  EXPECT_TRUE(config.tied);
}

// llama.cpp scales the attention of 62 layers as Gemma 3 27B does.
TEST(Gguf, GemmaOf62LayersScalesByTheWidthOfAllHeads) {
  const std::string text = R"({"model_type": "gemma3_text", "hidden_size": 5376,
    "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32,
    "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": )";
  EXPECT_NO_THROW(read_model_config(json::parse(text + "168}", "test"), "test"));
  EXPECT_THROW(read_model_config(json::parse(text + "128}", "test"), "test"), Error);
}

std::string tokenizer_json(const std::string& vocab, const std::string& merges) {
  return R"({"model": {"type": "BPE", "vocab": {)" + vocab + R"(}, "merges": [)" + merges +
         R"(]}, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
         "added_tokens": [{"id": 0, "content": "<end>", "special": true}]})";
}

std::string error_with(const std::string& text, std::uint64_t vocabulary = 8) {
  const json::Value tokenizer = json::parse(text, "test");
  const json::Value config = json::parse(R"({"eos_token_id": [0, 3]})", "test");
  TokenizerFiles files;
  files.tokenizer = &tokenizer;
  files.config = &config;
  files.source = "test";
  try {
    const Tokenizer read = read_tokenizer(files, vocabulary);
    return "read: " + std::string(read.model) + " " + std::string(read.pre);
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(GgufTokenizer, WhatContradictsItselfIsRefused) {
  const std::string vocab = R"("<end>": 0, "a": 1, "b": 2, "ab": 3)";
  EXPECT_EQ(error_with(tokenizer_json(vocab, R"(["a", "b"])")), "read: gpt2 gpt-2");
  EXPECT_EQ(error_with(tokenizer_json(vocab, R"("a b")")), "read: gpt2 gpt-2");
  EXPECT_NE(error_with(tokenizer_json(vocab, R"("a b")"), 3).find("the embedding has 3 rows"),
            std::string::npos);
  EXPECT_NE(error_with(tokenizer_json(vocab, R"(["b", "a"])")).find("not in the vocabulary"),
            std::string::npos);
  EXPECT_NE(error_with(tokenizer_json(vocab, R"("a b c")")).find("wanted two tokens"),
            std::string::npos);
  EXPECT_NE(error_with(tokenizer_json(vocab, "7")).find("wanted two tokens"), std::string::npos);
  EXPECT_NE(error_with(tokenizer_json(R"("a": 0)", "")).find("have the same number 0"),
            std::string::npos);
  EXPECT_NE(error_with(tokenizer_json(R"("<end>": 4)", "")).find("two numbers"), std::string::npos);
  EXPECT_NE(error_with(tokenizer_json(R"("": 2)", "")).find("is empty"), std::string::npos);
  EXPECT_NE(error_with(tokenizer_json(R"("[PAD5]": 2)", "")).find("[PAD5]"), std::string::npos);
}

}  // namespace
}  // namespace monograph::gguf
