#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "monograph/adapter/config.h"
#include "monograph/files/tests/temporary_folder.h"

namespace monograph {
namespace {

using files::error_of;

// A config with further members.
std::string with(const std::string& members) {
  return R"({"peft_type": "LORA", "r": 8, "lora_alpha": 16)" +
         (members.empty() ? "" : ", " + members) + "}";
}

AdapterConfig parse(const std::string& members) {
  return parse_adapter_config(with(members), "test");
}

std::string error(const std::string& members) {
  return error_of([&] { parse(members); });
}

TEST(AdapterConfig, RankAndScaleOfEachModule) {
  const AdapterConfig plain = parse("");
  EXPECT_EQ(plain.rank_of("model.q_proj"), 8u);
  EXPECT_EQ(plain.scale_of("model.q_proj"), 2.0);
  const AdapterConfig config = parse(
      R"("rank_pattern": {"v_proj": 4, "layers\\.1.*gate_proj": 2, "gate_proj": 32},
         "alpha_pattern": {"q_proj": 3, "v_proj": 0.5}, "use_rslora": true)");
  EXPECT_EQ(config.rank_of("model.layers.0.v_proj"), 4u);
  EXPECT_EQ(config.rank_of("model.layers.1.mlp.gate_proj"), 2u);  // the first rule that matches
  EXPECT_EQ(config.rank_of("model.layers.0.mlp.gate_proj"), 32u);
  EXPECT_EQ(config.scale_of("model.q_proj"), 3 / std::sqrt(8.0));
  EXPECT_EQ(config.scale_of("model.v_proj"), 0.5 / 2);
  EXPECT_EQ(config.scale_of("model.o_proj"), 16 / std::sqrt(8.0));
}

TEST(AdapterConfig, TokensAndModules) {
  const AdapterConfig list = parse(R"("trainable_token_indices": [5, 1])");
  ASSERT_EQ(list.trainable_tokens.size(), 1u);
  EXPECT_EQ(list.trainable_tokens[0].tokens, (std::vector<std::uint64_t>{5, 1}));
  const AdapterConfig map = parse(
      R"("trainable_token_indices": {"embed_tokens": [1]}, "modules_to_save": ["lm_head"],
         "bias": "lora_only", "base_model_name_or_path": "some/model")");
  EXPECT_EQ(map.trainable_tokens[0].module, "embed_tokens");
  EXPECT_EQ(map.modules_to_save, std::vector<std::string>{"lm_head"});
  EXPECT_EQ(map.base_model_name_or_path, "some/model");
}

struct Hostile {
  const char* members;
  const char* message;
};

TEST(AdapterConfig, ParametersAreNamedByTheirEnds) {
  const AdapterConfig config =
      parse(R"("target_parameters": ["experts.down_proj", "w"], "peft_version": "0.21.2")");
  EXPECT_EQ(config.peft_version, "0.21.2");
  for (const char* name : {"experts.down_proj", "m.0.experts.down_proj", "w", "m.w"}) {
    EXPECT_TRUE(config.targets(name)) << name;
  }
  for (const char* name :
       {"down_proj", "myexperts.down_proj", "experts.down_proj_bias", "mw", ""}) {
    EXPECT_FALSE(config.targets(name)) << name;
  }
  EXPECT_FALSE(parse(R"("use_dora": false)").targets("experts.down_proj"));
}

TEST(AdapterConfig, WhatIsNotUnderstoodIsRefusedAndNamed) {
  const Hostile kCases[] = {
      {R"("init_lora_weights": "pissa")", "init_lora_weights"},
      {R"("init_lora_weights": "pissa_niter_4")", "init_lora_weights"},
      {R"("init_lora_weights": "olora")", "init_lora_weights"},
      {R"("init_lora_weights": "loftq")", "init_lora_weights"},
      {R"("init_lora_weights": "corda")", "init_lora_weights"},
      {R"("init_lora_weights": "eva")", "init_lora_weights"},
      {R"("init_lora_weights": "mica")", "init_lora_weights"},
      {R"("init_lora_weights": "monograph_residual")", "merge_and_unload in Python"},
      {R"("init_lora_weights": 1)", "must be a string"},
      {R"("loftq_config": {"loftq_bits": 4})", "LoftQ"},
      {R"("corda_config": {"x": 1})", "CorDA"},
      {R"("eva_config": {"rho": 2})", "EVA"},
      {R"("lora_ga_config": {"x": 1})", "LoRA-GA"},
      {R"("layer_replication": [[0, 4], [2, 5]])", "repeats layers"},
      {R"("target_parameters": "experts.gate_up_proj")", "must be a list of strings"},
      {R"("megatron_config": {"tp": 2})", "Megatron"},
      {R"("alora_invocation_tokens": [1])", "some tokens"},
      {R"("use_qalora": true)", "QA-LoRA"},
      {R"("use_bdlora": {"n": 1})", "BD-LoRA"},
      {R"("velora_config": {"n": 1})", "VeLoRA"},
      {R"("kasa_config": {"n": 1})", "KaSA"},
      {R"("arrow_config": {"n": 1})", "routes"},
      {R"("monteclora_config": {"n": 1})", "MonteCLoRA"},
      {R"("use_mora": true)", "'use_mora' is not one that PEFT 0.21 has"},
      {R"("use_mora": false)", "'use_mora' is not one that PEFT 0.21 has"},
      {R"("future": 0)", "is not one that PEFT"},
      {R"("bias": "some")", "bias is 'some'"},
      {R"("r": 4)", "duplicate key 'r'"},
      {R"("rank_pattern": {"a": 1, "a": 2})", "duplicate key 'a'"},
      {R"("rank_pattern": {"a": 0})", "must be 1 to 65536"},
      {R"("rank_pattern": {"a": -1})", "wanted a whole number"},
      {R"("rank_pattern": {"(": 1})", "unmatched '('"},
      {R"("rank_pattern": [1])", "wanted"},
      {R"("alpha_pattern": {"a": 1e999})", "a double cannot hold"},
      {R"("alpha_pattern": {"a": "1"})", "must be a number"},
      {R"("alpha_pattern": {"a": NaN})", "must be a number"},
      {R"("use_rslora": "yes")", "must be true or false"},
      {R"("use_dora": 1)", "must be true or false"},
      {R"("modules_to_save": "lm_head")", "must be a list"},
      {R"("modules_to_save": [1])", "must be a string"},
      {R"("trainable_token_indices": [1, 1])", "token 1 twice"},
      {R"("trainable_token_indices": [-1])", "wanted"},
      {R"("trainable_token_indices": {"a": 1})", "must hold lists"},
      {R"("target_modules": [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]])",
       "deep"},
  };
  for (const Hostile& c : kCases) {
    EXPECT_NE(error(c.members).find(c.message), std::string::npos)
        << c.members << "\n  " << error(c.members);
  }
}

TEST(AdapterConfig, UnsetFieldsPass) {
  parse(R"("loftq_config": {}, "eva_config": null, "target_parameters": [], "use_qalora": false,
           "layer_replication": null, "init_lora_weights": "gaussian", "some_later_field": null,
           "target_modules": "all-linear", "auto_mapping": {"a": [1]}, "rank_pattern": null)");
}

TEST(AdapterConfig, WholeFilesThatAreNoConfig) {
  const auto refuse = [](const std::string& text, const char* message) {
    const std::string found = error_of([&] { parse_adapter_config(text, "test"); });
    EXPECT_NE(found.find(message), std::string::npos) << text.substr(0, 80) << "\n  " << found;
  };
  refuse("", "wanted");
  refuse("[]", "wanted");
  refuse("{", "wanted");
  refuse("{}", "peft_type is missing");
  refuse(R"({"peft_type": "LOHA", "r": 1, "lora_alpha": 1})", "must be 'LORA'");
  refuse(R"({"peft_type": "LORA", "lora_alpha": 1})", "r is missing");
  refuse(R"({"peft_type": "LORA", "r": 1})", "lora_alpha is missing");
  refuse(R"({"peft_type": "LORA", "r": 1.5, "lora_alpha": 1})", "test");
  refuse(R"({"peft_type": "LORA", "r": 99999999999999999999, "lora_alpha": 1})", "test");
  refuse(with("") + "x", "test");
  refuse("\xef\xbb\xbf" + with(""), "wanted");
  refuse(with(std::string("\"a\xff\": 1")), "UTF-8");
  refuse(std::string(1'000'001, ' '), "at most 1000000");
}

TEST(AdapterConfig, TheTableOfFieldsIsSortedAndGivesReasons) {
  for (const AdapterField& field : adapter_fields()) {
    EXPECT_EQ(field.reason.empty(), field.use == FieldUse::kUnderstood) << field.name;
  }
}

TEST(AdapterConfig, ThePatternsTogetherAreBounded) {
  const auto config = [](const std::string& before, const std::string& behind) {
    std::string text = R"({"peft_type": "LORA", "r": 8, "lora_alpha": 8, "alpha_pattern": {)";
    for (int i = 0; i < 1000; ++i) {
      text += (i == 0 ? "\"" : ", \"") + before + std::to_string(i) + behind + "\": 1";
    }
    return text + "}}";
  };
  // A thousand names of layers are many and cheap.
  const AdapterConfig names = parse_adapter_config(
      config("model.language_model.layers.", ".linear_attn.in_proj_qkvz"), "c");
  EXPECT_EQ(names.scale_of("x.model.language_model.layers.7.linear_attn.in_proj_qkvz"), 0.125);
  try {
    parse_adapter_config(config("(.{0,30}){0,30}Z", ""), "c");
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("alpha_pattern: the patterns together"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace monograph
