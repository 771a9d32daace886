#include "monograph/train/model_config.h"

#include <array>
#include <cmath>
#include <optional>

#include "monograph/base/error.h"
#include "monograph/train/config_keys.h"
#include "monograph/train/rope_config.h"

namespace monograph::train {
namespace {

constexpr std::size_t kMostLayers = 10000;

// Say nothing about a training step, whatever they are.
constexpr std::array kHarmless = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "cache_implementation",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
};

// Whether layer_types says of each layer that it has a window; nothing if there is no such key.
std::optional<std::vector<bool>> read_layer_types(ConfigKeys& keys, std::size_t layers) {
  const json::Value* const types = keys.find("layer_types");
  if (types == nullptr) return std::nullopt;
  if (!types->is(json::Kind::kArray) || types->items().size() != layers)
    keys.fail("layer_types", types, "one entry for each of " + std::to_string(layers) + " layers");
  std::vector<bool> sliding;
  for (const json::Value& type : types->items()) {
    const std::string name = ConfigKeys::shown(type);
    sliding.push_back(name == "sliding_attention");
    if (!sliding.back() && name != "full_attention")
      keys.fail("layer_types", &type, "full_attention or sliding_attention");
  }
  return sliding;
}

// What transformers makes of sliding_window, use_sliding_window, max_window_layers and layer_types.
std::vector<std::int64_t> read_windows(ConfigKeys& keys, const ModelConfig& model) {
  std::vector<std::int64_t> windows(model.layers, 0);
  if (model.family == "llama") return windows;
  if (model.family == "mistral") {
    // Without the key the class has a window of its own.
    if (!keys.has("sliding_window"))
      keys.fail("sliding_window", nullptr, "a number of tokens, or null for none");
    if (keys.find("sliding_window") != nullptr)
      windows.assign(model.layers, static_cast<std::int64_t>(keys.count("sliding_window")));
    return windows;
  }
  const bool used = keys.flag("use_sliding_window", false);
  const json::Value* const value = keys.find("sliding_window");
  const double full = keys.number("max_window_layers", 28);
  const std::optional<std::vector<bool>> types = read_layer_types(keys, model.layers);
  const std::int64_t window =
      used && value != nullptr ? static_cast<std::int64_t>(keys.count("sliding_window")) : 0;
  for (std::size_t i = 0; i < model.layers; ++i) {
    const bool sliding = types ? (*types)[i] : static_cast<double>(i) >= full;
    if (sliding && types && window == 0)
      keys.fail("sliding_window", value,
                "a number of tokens, for layer_types names sliding_attention");
    windows[i] = sliding ? window : 0;
  }
  return windows;
}

// Gemma 3: layers with a window and their own table of angles among those that see all tokens.
void read_gemma_layers(ConfigKeys& keys, const std::string& source, ModelConfig& model) {
  const RopeOfLayers ropes = read_rope_of_layers(keys, source);
  model.ropes = {ropes.full, ropes.sliding};
  const std::optional<std::vector<bool>> types = read_layer_types(keys, model.layers);
  keys.find("_sliding_window_pattern");  // transformers writes it, and reads the other
  const std::size_t pattern = keys.count("sliding_window_pattern", 6);
  const json::Value* const null =
      keys.has("sliding_window") ? keys.find("sliding_window") : nullptr;
  const std::size_t window =
      keys.has("sliding_window") && null == nullptr ? 0 : keys.count("sliding_window", 4096);
  for (std::size_t i = 0; i < model.layers; ++i) {
    const bool sliding = types ? (*types)[i] : (i + 1) % pattern != 0;
    if (sliding && window == 0)
      keys.fail("sliding_window", nullptr, "a number of tokens, for some layers have a window");
    model.windows.push_back(sliding ? static_cast<std::int64_t>(window) : 0);
    model.rope_of.push_back(sliding ? 1 : 0);
  }
}

void read_gemma(ConfigKeys& keys, const std::string& source, ModelConfig& model) {
  model.norm_rounding = NormRounding::kOnce;
  model.one_plus_gain = model.head_norms = model.branch_norms = true;
  model.embedding_scale = std::sqrt(static_cast<double>(model.width));
  model.activation = Activation::kGeluTanh;
  keys.must_be("hidden_activation", "gelu_pytorch_tanh");
  keys.must_be("attn_logit_softcapping", "null");
  keys.must_be("final_logit_softcapping", "null");
  keys.must_be("use_bidirectional_attention", "false");
  read_gemma_layers(keys, source, model);
}

// The layers that mlp_only_layers names have an MLP.
std::vector<bool> read_sparse_layers(ConfigKeys& keys, std::size_t layers) {
  const std::size_t step = keys.count("decoder_sparse_step", 1);
  std::vector<bool> sparse;
  for (std::size_t i = 0; i < layers; ++i) sparse.push_back((i + 1) % step == 0);
  const json::Value* const dense = keys.find("mlp_only_layers");
  if (dense == nullptr) return sparse;
  const char* const wanted = "a list of numbers of layers";
  if (!dense->is(json::Kind::kArray)) keys.fail("mlp_only_layers", dense, wanted);
  for (const json::Value& number : dense->items()) {
    const std::optional<std::uint64_t> layer = number.as_unsigned();
    if (!layer || *layer >= layers) keys.fail("mlp_only_layers", &number, wanted);
    sparse[static_cast<std::size_t>(*layer)] = false;
  }
  return sparse;
}

void read_experts(ConfigKeys& keys, ModelConfig& model) {
  ExpertsConfig& experts = model.experts;
  // transformers knows it by two names.
  const bool two = keys.find("num_local_experts") != nullptr;
  experts.count = keys.count(two ? "num_local_experts" : "num_experts");
  if (two && keys.find("num_experts") != nullptr && keys.count("num_experts") != experts.count)
    keys.fail("num_experts", keys.find("num_experts"), "the same as num_local_experts");
  experts.slots = keys.count("num_experts_per_tok");
  if (experts.slots > experts.count)
    keys.fail("num_experts_per_tok", keys.find("num_experts_per_tok"),
              "at most the experts, " + std::to_string(experts.count));
  experts.inner = keys.count("moe_intermediate_size");
  experts.normalise = keys.flag("norm_topk_prob", false);
  experts.layers = read_sparse_layers(keys, model.layers);
  keys.must_be("output_router_logits", "false");  // a loss of the router would come with it
  keys.find("router_aux_loss_coef");
  keys.must_be("use_sliding_window", "false");
  for (const char* const unused : {"sliding_window", "max_window_layers"}) keys.find(unused);
  model.windows.assign(model.layers, 0);
}

void check_heads(const ModelConfig& model, std::string_view source) {
  if (model.heads % model.kv_heads != 0)
    throw Error(std::string(source) + ": num_key_value_heads is " + std::to_string(model.kv_heads) +
                ", wanted a divisor of num_attention_heads, " + std::to_string(model.heads));
  if (model.head_size % 2 != 0 || model.head_size > 512)
    throw Error(std::string(source) + ": head_dim is " + std::to_string(model.head_size) +
                ", wanted an even number up to 512");
}

}  // namespace

bool ModelConfig::has_mlp() const {
  for (std::size_t i = 0; i < layers; ++i)
    if (!has_experts(i)) return true;
  return false;
}

ModelConfig read_model_config(const json::Value& config, std::string_view source) {
  ConfigKeys keys(config, source);
  ModelConfig model;
  const json::Value* const type = keys.find("model_type");
  model.family = type == nullptr ? "" : ConfigKeys::shown(*type);
  const bool llama = model.family == "llama", mistral = model.family == "mistral";
  const bool qwen2 = model.family == "qwen2", qwen3 = model.family == "qwen3";
  const bool mixture = model.family == "qwen3_moe", gemma = model.family == "gemma3_text";
  if (!llama && !mistral && !qwen2 && !qwen3 && !mixture && !gemma)
    keys.fail("model_type", type, "llama, mistral, qwen2, qwen3, qwen3_moe or gemma3_text");
  model.width = keys.count("hidden_size");
  model.inner = keys.count("intermediate_size");
  model.layers = keys.count("num_hidden_layers");
  if (model.layers > kMostLayers)
    keys.fail("num_hidden_layers", keys.find("num_hidden_layers"), "10000 at most");
  model.heads = keys.count("num_attention_heads");
  // Where the class has another number, the key must be there.
  model.kv_heads =
      llama ? keys.count("num_key_value_heads", model.heads) : keys.count("num_key_value_heads");
  // Qwen3's heads are 128 wide and Gemma's 256, unless the config says another width.
  model.head_size = keys.count("head_dim", qwen3 ? 128 : gemma ? 256 : model.width / model.heads);
  const std::size_t scaled_by = gemma ? keys.count("query_pre_attn_scalar", 256) : model.head_size;
  model.attention_scale = std::pow(static_cast<double>(scaled_by), -0.5);
  model.vocabulary = keys.count("vocab_size");
  if (keys.find("max_position_embeddings") != nullptr)
    model.positions = keys.count("max_position_embeddings");
  model.eps = static_cast<float>(keys.number("rms_norm_eps"));
  if (!std::isfinite(model.eps))
    keys.fail("rms_norm_eps", keys.find("rms_norm_eps"), "a number in the range of float32");
  model.tied = keys.flag("tie_word_embeddings", gemma);
  keys.must_be("attention_dropout", "0");
  keys.must_be("chunk_size_feed_forward", "0");
  keys.must_be("is_encoder_decoder", "false");
  if (llama) keys.must_be("pretraining_tp", "1");
  const bool biased = (llama || qwen3 || mixture || gemma) && keys.flag("attention_bias", false);
  model.qkv_bias = qwen2 || biased;
  model.out_bias = biased;
  model.mlp_bias = llama && keys.flag("mlp_bias", false);
  if (gemma) {
    read_gemma(keys, std::string(source), model);
  } else {
    keys.must_be("hidden_act", "silu");
    model.head_norms = qwen3 || mixture;
    model.ropes = {read_rope(keys, std::string(source),
                             llama ? std::optional<double>(10000.0) : std::nullopt)};
    model.rope_of.assign(model.layers, 0);
    if (mixture)
      read_experts(keys, model);
    else
      model.windows = read_windows(keys, model);
  }
  const json::Value* const packing = keys.find("quantization_config");
  if (packing != nullptr && !packing->is(json::Kind::kObject))
    keys.fail("quantization_config", packing, "an object");
  keys.finish(kHarmless);
  check_heads(model, source);
  return model;
}

}  // namespace monograph::train
