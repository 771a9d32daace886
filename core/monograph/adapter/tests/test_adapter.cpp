#include <gtest/gtest.h>

#include <string>

#include "monograph/adapter/adapter.h"
#include "monograph/files/tests/temporary_folder.h"
#include "monograph/safetensors/writer.h"

namespace monograph {
namespace {

using namespace files;
using namespace safetensors;

const std::string kModule = "base_model.model.m.layers.0.q_proj.";

struct Spec {
  std::string name;
  std::vector<std::uint64_t> shape;
  StoredDType dtype = StoredDType::kF32;
};

void write_adapter(const TemporaryFolder& folder, const std::vector<Spec>& tensors,
                   const std::string& members = "", const Metadata& metadata = {}) {
  write_all(folder / "adapter_config.json",
            R"({"peft_type": "LORA", "r": 2, "lora_alpha": 4)" + members + "}");
  std::vector<TensorSpec> specs;
  for (const Spec& spec : tensors) specs.push_back({spec.name, spec.dtype, spec.shape});
  Writer writer(folder / "adapter_model.safetensors", plan_file(specs, metadata));
  for (const TensorEntry& entry : writer.plan().header.tensors) {
    writer.write(entry.name, 0, std::vector<std::uint8_t>(entry.size_bytes));
  }
  writer.finish();
}

std::string error_with(const std::vector<Spec>& tensors, const std::string& members = "",
                       const Metadata& metadata = {}) {
  const TemporaryFolder folder;
  write_adapter(folder, tensors, members, metadata);
  return error_of([&] { Adapter::open(folder.path()); });
}

const Spec kA = {kModule + "lora_A.weight", {2, 6}}, kB = {kModule + "lora_B.weight", {4, 2}};

TEST(Adapter, EveryTensorFindsItsRole) {
  const TemporaryFolder folder;
  write_adapter(folder,
                {kA,
                 {kModule + "lora_B.weight", {4, 2}, StoredDType::kBF16},
                 {kModule + "lora_magnitude_vector", {4}},
                 {kModule + "lora_B.bias", {4}},
                 {"base_model.model.m.embed_tokens.lora_embedding_A", {2, 9}},
                 {"base_model.model.m.embed_tokens.lora_embedding_B", {6, 2}},
                 {"base_model.model.m.embed_tokens.lora_magnitude_vector", {6}},
                 {"base_model.model.m.embed_tokens.base_layer.weight", {9, 6}},
                 {"base_model.model.lm_head.weight", {9, 6}},
                 {"base_model.model.m.norm.modules_to_save.weight", {6}},
                 {"base_model.model.v.embed.token_adapter.trainable_tokens_delta", {2, 6}}},
                R"(, "use_dora": true, "lora_bias": true,
                    "trainable_token_indices": {"v.embed": [7, 3]})",
                {{"monograph.base_weights", "dequantized"}});
  const Adapter adapter = Adapter::open(folder.path());
  ASSERT_EQ(adapter.low_rank().size(), 2u);
  const LowRank& lora = adapter.low_rank().at("m.layers.0.q_proj");
  EXPECT_EQ(lora.scale, 2.0);
  EXPECT_FALSE(lora.embedding);
  EXPECT_NE(lora.bias, nullptr);
  EXPECT_TRUE(adapter.low_rank().at("m.embed_tokens").embedding);
  EXPECT_EQ(adapter.replacements().size(), 3u);
  EXPECT_TRUE(adapter.replacements().contains("m.embed_tokens.weight"));
  EXPECT_TRUE(adapter.replacements().contains("m.norm.weight"));
  EXPECT_EQ(adapter.token_rows().at("v.embed.weight").tokens, (std::vector<std::uint64_t>{7, 3}));
  EXPECT_EQ(adapter.recorded_base().weights, "dequantized");
}

TEST(Adapter, HostileTensorsAreRefused) {
  const auto refused = [](const std::string& error, const char* message) {
    EXPECT_NE(error.find(message), std::string::npos) << error;
  };
  refused(error_with({kA}), "has no lora_B");
  refused(error_with({kB}), "has no lora_A");
  refused(error_with({{kModule + "lora_A.weight", {3, 6}}, kB}), "gives it rank 2");
  refused(error_with({kA, {kModule + "lora_B.weight", {4, 3}}}), "gives it rank 2");
  refused(error_with({{kModule + "lora_A.weight", {2, 6, 1, 1}}, kB}), "only linear layers");
  refused(error_with({{kModule + "lora_A.weight", {2, 6}, StoredDType::kF64}, kB}), "must be F32");
  refused(error_with({kA, kB, {kModule + "lora_magnitude_vector", {4}}}), "use_dora is not set");
  refused(error_with({kA, kB}, R"(, "use_dora": true)"), "no lora_magnitude_vector");
  refused(error_with({kA, kB, {kModule + "lora_magnitude_vector", {5}}}, R"(, "use_dora": true)"),
          "must have 4 elements");
  refused(error_with({kA, kB, {kModule + "lora_B.bias", {4}}}), "lora_bias is not set");
  refused(error_with({kA, kB}, R"(, "lora_bias": true)"), "no lora_B.bias");
  refused(error_with({kA, kB, {kModule + "lora_C.weight", {4}}}), "is not known");
  refused(error_with({kA, kB, {"model.norm.weight", {4}}}), "must begin with");
  refused(error_with({kA,
                      kB,
                      {kModule + "base_layer.weight", {4}},
                      {kModule + "modules_to_save.weight", {4}}}),
          "two tensors take the place");
  refused(error_with({kA, kB, {kModule + "token_adapter.trainable_tokens_delta", {2, 6}}}),
          "names no token");
  refused(error_with({kA, kB}, R"(, "trainable_token_indices": [1])"), "names 1 modules");
  refused(error_with({kA, kB, {kModule + "token_adapter.trainable_tokens_delta", {2, 6}}},
                     R"(, "trainable_token_indices": [1])"),
          "for 1 tokens");
  refused(error_with({}), "holds no tensor");
}

TEST(Adapter, PicklesAreNeverRead) {
  const TemporaryFolder folder;
  write_all(folder / "adapter_config.json", R"({"peft_type": "LORA", "r": 2, "lora_alpha": 4})");
  write_all(folder / "adapter_model.bin", "x");
  EXPECT_NE(error_of([&] { Adapter::open(folder.path()); }).find("a pickle"), std::string::npos);
}

TEST(Adapter, TheRecordedBase) {
  const std::string hash(64, 'a');
  const TemporaryFolder folder;
  write_adapter(folder, {kA, kB}, "", {{"monograph.base_sha256", hash}});
  EXPECT_EQ(Adapter::open(folder.path()).recorded_base().sha256, hash);
  const std::string other(64, 'b');
  write_all(folder / "monograph.json", R"({"schema_version": 1, "base": {"sha256": ")" + other +
                                           R"(", "weights": "original"}})");
  EXPECT_NE(error_of([&] { Adapter::open(folder.path()); }).find("elsewhere"), std::string::npos);
  const auto refuse = [](const std::string& json) {
    EXPECT_NE(error_of([&] { parse_recorded_base(json, "test"); }), "no error") << json;
  };
  refuse("[]");
  refuse(R"({"schema_version": 2})");
  refuse(R"({"base": {"sha256": "xyz"}})");
  refuse(R"({"base": {"weights": "other"}})");
  refuse(R"({"base": {"sha256": 1}})");
  EXPECT_EQ(parse_recorded_base(R"({"schema_version": 1, "recipe": {"a": [1]}})", "t").sha256, "");
}

}  // namespace
}  // namespace monograph
