#include <gtest/gtest.h>

#include "monograph/gguf/import.h"
#include "monograph/gguf/names.h"
#include "monograph/gguf/row_order.h"

namespace monograph::gguf {
namespace {

TEST(GgufImport, TheWayBackOfRowsAndNames) {
  for (const std::uint64_t head : {2u, 6u, 16u, 128u}) {
    for (std::uint64_t row = 0; row < 3 * head; ++row) {
      EXPECT_EQ(stored_row(source_row(row, head), head), row);
      EXPECT_EQ(source_row(stored_row(row, head), head), row);
    }
  }
  for (const char* type : {"llama", "qwen3", "gemma3_text"}) {
    const Architecture& architecture = *find_architecture(type);
    for (const char* module :
         {"model.embed_tokens", "lm_head", "model.norm", "model.layers.10.self_attn.q_proj",
          "model.layers.0.mlp.down_proj", "model.layers.3.input_layernorm",
          "model.layers.3.post_attention_layernorm", "model.layers.3.self_attn.k_norm"}) {
      std::optional<std::string> tensor = matrix_name(module);
      if (!tensor) tensor = norm_name(architecture, module);
      ASSERT_TRUE(tensor) << module;
      EXPECT_EQ(module_name(architecture, *tensor), module) << type;
    }
  }
  const Architecture& experts = *find_named_architecture("qwen3moe");
  EXPECT_EQ(module_name(experts, "blk.2.ffn_up_exps"), "model.layers.2.mlp.experts.*.up_proj");
  EXPECT_EQ(module_name(*find_architecture("llama"), "blk.2.ffn_up_exps"), std::nullopt);
  const Architecture& gpt_oss = *find_architecture("gpt_oss");
  for (const auto& [tensor, module] :
       {std::pair("ffn_gate_exps", "mlp.experts.*.gate_proj"),
        std::pair("ffn_gate_inp", "mlp.router"), std::pair("attn_sinks", "self_attn.sinks"),
        std::pair("attn_output", "self_attn.o_proj"),
        std::pair("post_attention_norm", "post_attention_layernorm")}) {
    EXPECT_EQ(module_name(gpt_oss, "blk.2." + std::string(tensor)),
              "model.layers.2." + std::string(module));
  }
  EXPECT_EQ(module_name(gpt_oss, "blk.2.ffn_norm"), std::nullopt);
  EXPECT_EQ(parameter_name(gpt_oss, "model.layers.2.self_attn.sinks"), "blk.2.attn_sinks");
  EXPECT_EQ(parameter_name(experts, "model.layers.2.self_attn.sinks"), std::nullopt);
  const Architecture& mixtral = *find_named_architecture("llama", /*has_experts=*/true);
  EXPECT_EQ(mixtral.model_type, "mixtral");
  for (const auto& [tensor, module] : {std::pair("ffn_gate_exps", "block_sparse_moe.experts.*.w1"),
                                       std::pair("ffn_up_exps", "block_sparse_moe.experts.*.w3"),
                                       std::pair("ffn_down_exps", "block_sparse_moe.experts.*.w2"),
                                       std::pair("ffn_gate_inp", "block_sparse_moe.gate"),
                                       std::pair("attn_q", "self_attn.q_proj")}) {
    EXPECT_EQ(module_name(mixtral, "blk.2." + std::string(tensor)),
              "model.layers.2." + std::string(module));
  }
  EXPECT_EQ(module_name(experts, "blk.2.attn_sinks"), std::nullopt);
  EXPECT_EQ(module_name(experts, "blk.x.attn_q"), std::nullopt);
  EXPECT_EQ(module_name(experts, "blk.1.ssm_in"), std::nullopt);
  // Another spelling of a layer would be a second one of that number.
  EXPECT_EQ(module_name(experts, "blk.00.attn_q"), std::nullopt);
  EXPECT_EQ(module_name(experts, "blk.1000000.attn_q"), std::nullopt);
  EXPECT_EQ(find_named_architecture("mamba"), nullptr);
}

}  // namespace
}  // namespace monograph::gguf
