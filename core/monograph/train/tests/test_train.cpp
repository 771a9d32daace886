// The parts that know no model: batches, the tree, the config.
#include <gtest/gtest.h>

#include <numeric>
#include <string>

#include "monograph/base/error.h"
#include "monograph/kernels/linear_cross_entropy/linear_cross_entropy.h"
#include "monograph/train/batch.h"
#include "monograph/train/model_config.h"
#include "monograph/train/tree_sum.h"

namespace monograph::train {
namespace {

constexpr std::int64_t kNone = kIgnoredLabel;

TEST(Batch, PackedDocumentsPredictNothingOfEachOther) {
  const std::vector<std::int32_t> one = {5, 6, 7}, two = {8, 9}, hidden = {-100, -100, 9};
  const Document documents[] = {{one, one}, {two, two}, {{}, {}}, {one, hidden}};
  const Batch batch = packed_batch(documents, 5, 1);
  EXPECT_EQ(batch.rows, 1u);
  EXPECT_EQ(batch.length, 10u);
  EXPECT_EQ(batch.ids, (std::vector<std::int64_t>{5, 6, 7, 8, 9, 5, 6, 7, 1, 1}));
  EXPECT_EQ(batch.targets,
            (std::vector<std::int64_t>{6, 7, kNone, 9, kNone, kNone, 9, kNone, kNone, kNone}));
  EXPECT_EQ(batch.positions, (std::vector<std::int64_t>{0, 1, 2, 0, 1, 0, 1, 2, 0, 1}));
  EXPECT_EQ(batch.offsets, (std::vector<std::int32_t>{0, 3, 5, 8}));
  EXPECT_TRUE(batch.key_lengths.empty());
  EXPECT_EQ(batch.count_targets(), 4u);
  EXPECT_EQ(packed_batch({}, 4, 3).ids, (std::vector<std::int64_t>{3, 3, 3, 3}));
}

TEST(Batch, PaddingIsInNoDocument) {
  const std::vector<std::int32_t> one = {5, 6, 7}, two = {8};
  const Document documents[] = {{one, one}, {two, two}};
  const Batch batch = padded_batch(documents, 3, 4, 1);
  EXPECT_EQ(batch.rows, 3u);
  EXPECT_EQ(batch.length, 4u);
  EXPECT_EQ(batch.ids, (std::vector<std::int64_t>{5, 6, 7, 1, 8, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(batch.count_targets(), 2u);
  EXPECT_EQ(batch.positions, (std::vector<std::int64_t>{0, 1, 2, 3}));
  EXPECT_EQ(batch.offsets, (std::vector<std::int32_t>{0, 3, 4, 5, 8, 9, 12}));
  EXPECT_EQ(batch.key_lengths, (std::vector<std::int32_t>{3, 0, 1, 0, 1, 0}));
}

// The tree as text: what is added to what.
std::string tree_of(std::size_t micro_batches, std::size_t begin, std::size_t end,
                    std::size_t leaves) {
  std::string text;
  for (std::size_t i = begin * micro_batches / leaves;
       end - begin == 1 && i < end * micro_batches / leaves; ++i)
    text = text.empty() ? std::to_string(i) : "(" + text + "+" + std::to_string(i) + ")";
  if (end - begin == 1) return text;
  const std::size_t middle = begin + (end - begin) / 2;
  const std::string left = tree_of(micro_batches, begin, middle, leaves);
  const std::string right = tree_of(micro_batches, middle, end, leaves);
  return left.empty() || right.empty() ? left + right : "(" + left + "+" + right + ")";
}

float value_of(const std::string& tree, std::size_t& at) {
  if (tree[at] != '(') {
    std::size_t used = 0;
    const int index = std::stoi(tree.substr(at), &used);
    at += used;
    return 1.0f / static_cast<float>(index + 3);
  }
  ++at;
  const float left = value_of(tree, at);
  ++at;  // +
  const float right = value_of(tree, at);
  ++at;  // )
  return left + right;
}

TEST(TreeSum, AddsInTheOrderOfTheTree) {
  const Workers workers = {serial_for, 1};
  for (std::size_t micro_batches = 1; micro_batches <= 17; ++micro_batches)
    for (std::size_t leaves = 1; leaves <= 20; ++leaves) {
      std::size_t asked = 0;
      const auto part = [&](std::size_t index) {
        EXPECT_EQ(index, asked++);
        return std::vector<float>(3, 1.0f / static_cast<float>(index + 3));
      };
      const std::vector<float> sum = tree_sum(micro_batches, leaves, part, workers);
      std::size_t at = 0;
      const float want = value_of(tree_of(micro_batches, 0, leaves, leaves), at);
      EXPECT_EQ(sum, std::vector<float>(3, want)) << micro_batches << " in " << leaves;
      EXPECT_EQ(asked, micro_batches);
    }
}

ModelConfig parse(const std::string& more) {
  const std::string text = R"({"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 10, "rms_norm_eps": 1e-5, )" +
                           more + "}";
  return read_model_config(json::parse(text, "test"), "test");
}

std::string error(const std::string& more) {
  try {
    parse(more);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(ModelConfig, OldAndNewNamesOfRotaryPositions) {
  const ModelConfig older = parse(R"("model_type": "llama", "rope_theta": 5e5, "rope_scaling":
    {"type": "linear", "factor": 4.0})");
  EXPECT_EQ(older.ropes[0].theta, 5e5);
  EXPECT_EQ(older.ropes[0].kind, RopeKind::kLinear);
  EXPECT_EQ(older.ropes[0].factor, 4);
  EXPECT_EQ(parse(R"("model_type": "llama")").ropes[0].theta, 10000);
  EXPECT_EQ(error(R"("model_type": "qwen2")"),
            "test: rope_theta is missing, wanted a number, 0 or more");
}

TEST(ModelConfig, WindowsOfLayers) {
  const std::string qwen = R"("model_type": "qwen2", "rope_theta": 1e4, "sliding_window": 7)";
  using Windows = std::vector<std::int64_t>;
  EXPECT_EQ(parse(qwen).windows, Windows(3, 0));
  EXPECT_EQ(parse(qwen + R"(, "use_sliding_window": true, "max_window_layers": 1)").windows,
            (Windows{0, 7, 7}));
  EXPECT_EQ(parse(qwen + R"(, "use_sliding_window": true, "layer_types":
      ["sliding_attention", "full_attention", "sliding_attention"])")
                .windows,
            (Windows{7, 0, 7}));
  const std::string mistral = R"("model_type": "mistral", "rope_theta": 1e4)";
  EXPECT_EQ(parse(mistral + R"(, "sliding_window": 7)").windows, Windows(3, 7));
  EXPECT_EQ(parse(mistral + R"(, "sliding_window": null)").windows, Windows(3, 0));
  EXPECT_NE(error(mistral).find("sliding_window is missing"), std::string::npos);
}

TEST(ModelConfig, LayersOfGemma) {
  const std::string gemma = R"("model_type": "gemma3_text", "sliding_window": 7)";
  using Windows = std::vector<std::int64_t>;
  const ModelConfig older = parse(gemma + R"(, "sliding_window_pattern": 2, "rope_theta": 5e5,
      "rope_local_base_freq": 1e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0})");
  EXPECT_EQ(older.windows, (Windows{7, 0, 7}));
  EXPECT_EQ(older.rope_of, (std::vector<std::size_t>{1, 0, 1}));
  EXPECT_EQ(older.ropes[0].theta, 5e5);
  EXPECT_EQ(older.ropes[0].factor, 8);
  EXPECT_EQ(older.ropes[1].theta, 1e3);
  EXPECT_EQ(older.ropes[1].kind, RopeKind::kDefault);
  // What the class has.
  const ModelConfig least = parse(R"("model_type": "gemma3_text")");
  EXPECT_EQ(least.windows, Windows(3, 4096));
  EXPECT_EQ(least.ropes[0].theta, 1e6);
  EXPECT_EQ(least.ropes[1].theta, 1e4);
  EXPECT_EQ(least.head_size, 256u);
  EXPECT_EQ(least.attention_scale, 1.0 / 16);
  EXPECT_EQ(least.embedding_scale, 8);
  EXPECT_TRUE(least.tied);
  const auto refused = [&](const std::string& more, const char* words) {
    EXPECT_NE(error(gemma + ", " + more).find(words), std::string::npos)
        << error(gemma + ", " + more);
  };
  refused(R"("final_logit_softcapping": 30.0)", "final_logit_softcapping is 30.0, wanted null");
  refused(R"("attn_logit_softcapping": 50.0)", "attn_logit_softcapping is 50.0, wanted null");
  refused(R"("hidden_activation": "silu")",
          "hidden_activation is 'silu', wanted gelu_pytorch_tanh");
  refused(R"("use_bidirectional_attention": true)", "use_bidirectional_attention is true");
  refused(R"("query_pre_attn_scalar": 0)", "query_pre_attn_scalar is 0");
  refused(R"("layer_types": ["full_attention"])", "wanted one entry for each of 3 layers");
  refused(R"("layer_types": "full")", "layer_types is 'full'");
  refused(R"("rope_parameters": {"rope_theta": 1e4})", "rope_parameters: rope_theta is not a key");
  refused(R"("rope_parameters": {"full_attention": {"rope_type": "yarn"}})", "rope_type is 'yarn'");
  EXPECT_NE(error(R"("model_type": "gemma3_text", "sliding_window": null)")
                .find("sliding_window is missing, wanted a number of tokens"),
            std::string::npos);
}

TEST(ModelConfig, LayersWithExperts) {
  const std::string mixture = R"("model_type": "qwen3_moe", "rope_theta": 1e4, "num_experts": 8,
      "num_experts_per_tok": 2, "moe_intermediate_size": 32)";
  using Layers = std::vector<bool>;
  const ModelConfig least = parse(mixture);
  EXPECT_EQ(least.experts.layers, Layers(3, true));
  EXPECT_FALSE(least.experts.normalise || least.has_mlp());
  EXPECT_EQ(least.experts.count, 8u);
  const ModelConfig some = parse(mixture + R"(, "num_local_experts": 8, "norm_topk_prob": true,
      "decoder_sparse_step": 2, "router_aux_loss_coef": 0.1, "max_window_layers": 48,
      "sliding_window": null, "output_router_logits": false)");
  EXPECT_EQ(some.experts.layers, (Layers{false, true, false}));
  EXPECT_TRUE(some.experts.normalise && some.has_mlp());
  EXPECT_EQ(parse(mixture + R"(, "mlp_only_layers": [0, 2])").experts.layers,
            (Layers{false, true, false}));
  const auto refused = [&](const std::string& more, const char* words) {
    const std::string found = error(mixture + ", " + more);
    EXPECT_NE(found.find(words), std::string::npos) << found;
  };
  refused(R"("mlp_only_layers": 1)", "mlp_only_layers is 1, wanted a list");
  refused(R"("mlp_only_layers": [-1])", "mlp_only_layers is -1, wanted a list");
  refused(R"("decoder_sparse_step": 0)", "decoder_sparse_step is 0");
  refused(R"("num_local_experts": 9)", "num_experts is 8, wanted the same as num_local_experts");
  EXPECT_NE(error(R"("model_type": "qwen3_moe", "rope_theta": 1)").find("num_experts is missing"),
            std::string::npos);
}

TEST(ModelConfig, EveryOtherValueIsRefusedByName) {
  const std::string llama = R"("model_type": "llama", )";
  EXPECT_EQ(error(llama + R"("hidden_act": "relu")"), "test: hidden_act is 'relu', wanted silu");
  EXPECT_EQ(error(llama + R"("pretraining_tp": 2)"), "test: pretraining_tp is 2, wanted 1");
  EXPECT_EQ(error(llama + R"("attention_dropout": 0.5)"),
            "test: attention_dropout is 0.5, wanted 0");
  EXPECT_NE(error(llama + R"("layer_types": [])").find("layer_types is not a key"),
            std::string::npos);
  EXPECT_NE(error(llama + R"("rope_parameters": {"rope_theta": 1, "mrope_section": []})")
                .find("mrope_section is not a key"),
            std::string::npos);
  EXPECT_EQ(error(llama + R"("rope_theta": 0)"), "test: rope_theta is 0, wanted a number above 0");
  EXPECT_EQ(error(llama + R"("rope_parameters": {"rope_theta": 1e4, "rope_type": "linear",
      "factor": 0})"),
            "test: rope_parameters: factor is 0, wanted a number above 0");
  EXPECT_NE(error(llama + R"("head_dim": 15)").find("head_dim is 15"), std::string::npos);
  EXPECT_NE(error(R"("model_type": "gemma3")").find("model_type is 'gemma3'"), std::string::npos);
  // What changes nothing.
  EXPECT_EQ(parse(llama + R"("attention_dropout": 0, "bos_token_id": 1, "use_cache": true)").width,
            64u);
}

}  // namespace
}  // namespace monograph::train
