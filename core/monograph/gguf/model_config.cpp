#include "monograph/gguf/model_config.h"

#include <array>
#include <utility>

#include "monograph/gguf/config_settings.h"
#include "monograph/gguf/model_rope.h"

namespace monograph::gguf {
namespace {

using json::Kind;
using json::Value;

// What transformers takes where config.json says nothing.
struct Defaults {
  std::string_view name;  // of the architecture, or below them of a model type of its own
  std::uint64_t heads, kv_heads, head_dim, vocabulary, context;  // 0: must be there, or follows
  double rope_theta, norm_epsilon;
  bool tied;
  std::string_view activation;
};
constexpr std::array kDefaults = {
    Defaults{"llama", 0, 0, 0, 0, 0, 10000, 1e-6, false, "silu"},
    Defaults{"qwen2", 0, 32, 0, 0, 0, 10000, 1e-6, false, "silu"},
    Defaults{"qwen3", 0, 0, 128, 0, 0, 10000, 1e-6, false, "silu"},
    Defaults{"gemma3", 8, 4, 256, 262208, 131072, 1000000, 1e-6, true, "gelu_pytorch_tanh"},
    Defaults{"qwen3moe", 0, 4, 0, 0, 0, 10000, 1e-6, false, "silu"},
    Defaults{"mixtral", 0, 8, 0, 0, 0, 1000000, 1e-5, false, "silu"},
    Defaults{"phi3", 0, 0, 0, 0, 4096, 10000, 1e-5, false, "silu"},
    Defaults{"gpt-oss", 64, 8, 64, 201088, 131072, 150000, 1e-5, false, "silu"},
};
// Constants of llama.cpp's graph of gpt-oss, whose every second layer sees everything.
constexpr double kGptOssAlpha = 1.702, kGptOssLimit = 7;
constexpr std::uint64_t kGptOssPeriod = 2, kGptOssWindow = 128;

const Architecture& architecture_of(const ConfigSettings& settings) {
  const std::string_view type = settings.text("model_type");
  const Architecture* found = find_architecture(type);
  if (found == nullptr || found->exported == Exported::kNo) {
    settings.fail("model_type is " + text::in_quotes(type) + ", export to GGUF knows " +
                  exported_model_types());
  }
  return *found;
}

// Every layer but the last of a period sees the window alone in llama.cpp.
void check_sliding_layers(const ConfigSettings& settings, const ModelConfig& config,
                          std::uint64_t period, std::uint64_t wanted_period) {
  const Value* types = settings.find("layer_types");
  for (std::uint64_t layer = 0; layer < config.layers; ++layer) {
    const bool full = (layer + 1) % wanted_period == 0;
    bool found = (layer + 1) % period == 0;
    if (types != nullptr) {
      if (!types->is(Kind::kArray) || types->items().size() != config.layers) {
        settings.fail("layer_types must have a name for each of " + std::to_string(config.layers) +
                      " layers");
      }
      found = types->items()[layer].as_string().value_or("") != "sliding_attention";
    }
    if (found != full) {
      settings.fail("layer " + std::to_string(layer) + " has " + (found ? "full" : "sliding") +
                    " attention, llama.cpp has full attention in every " +
                    (wanted_period == kGemmaPeriod ? "sixth" : "second"));
    }
  }
}

void read_gemma(const ConfigSettings& settings, const Value* parameters, ModelConfig& config) {
  const Value* local = parameters == nullptr ? nullptr : parameters->find("sliding_attention");
  const double local_theta = theta_of(settings, local, "rope_local_base_freq", kGemmaLocalTheta);
  if (local_theta != kGemmaLocalTheta) {
    settings.fail("the base of the rotary embedding of sliding layers is " +
                  std::to_string(local_theta) + ", llama.cpp has 10000");
  }
  if (const Value* type = local == nullptr ? nullptr : local->find("rope_type")) {
    if (type->as_string().value_or("") != "default") {
      settings.fail("rope_type of sliding layers is " + ConfigSettings::shown(type) +
                    ", wanted \"default\"");
    }
  }
  config.sliding_window = settings.count("sliding_window", 4096);
  for (const std::string_view key :
       {"attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"}) {
    settings.must_be_off(key);
  }
  const double scalar = settings.number("query_pre_attn_scalar", 256);
  const std::uint64_t wanted =
      config.layers == kGemma27BLayers ? config.hidden / config.heads : config.head_dim;
  if (scalar != static_cast<double>(wanted)) {
    settings.fail("query_pre_attn_scalar is " + std::to_string(scalar) + ", llama.cpp takes " +
                  std::to_string(wanted));
  }
  const std::uint64_t period =
      settings.count(settings.find("sliding_window_pattern") != nullptr ? "sliding_window_pattern"
                                                                        : "_sliding_window_pattern",
                     kGemmaPeriod);
  check_sliding_layers(settings, config, period, kGemmaPeriod);
}

void read_gpt_oss(const ConfigSettings& settings, ModelConfig& config) {
  config.sliding_window = settings.count("sliding_window", kGptOssWindow);
  check_sliding_layers(settings, config, kGptOssPeriod, kGptOssPeriod);
  if (!settings.flag("attention_bias", true)) {
    settings.fail("attention_bias is false, llama.cpp has biases in every gpt-oss");
  }
  if (config.tied) {
    settings.fail("tie_word_embeddings is true, llama.cpp opens no gpt-oss without a head");
  }
  for (const auto& [key, wanted] :
       {std::pair("swiglu_alpha", kGptOssAlpha), std::pair("swiglu_limit", kGptOssLimit)}) {
    if (const double found = settings.number(key, wanted); found != wanted) {
      settings.fail(std::string(key) + " is " + std::to_string(found) + ", llama.cpp has " +
                    std::to_string(wanted));
    }
  }
  if (config.rope.scaling == RopeScaling::kYarn) {
    config.notes.emplace_back(
        "llama.cpp rounds the borders of yarn's ramp, transformers does not: frequencies between "
        "them differ");
  }
}

void read_phi(const ConfigSettings& settings, ModelConfig& config) {
  if (settings.find("sliding_window") != nullptr) {
    config.sliding_window = settings.count("sliding_window");
    config.notes.push_back("llama.cpp has no sliding window for Phi 3: beyond " +
                           std::to_string(config.sliding_window) +
                           " tokens it sees more than transformers does");
  }
  if (config.rope.scaling == RopeScaling::kLongrope) {
    config.notes.push_back("llama.cpp takes the factors of long texts where its context is above " +
                           std::to_string(config.rope.original_context) +
                           ", transformers where a text is");
  }
}

// Every layer has them in llama.cpp, and the weights of those that are chosen add up to 1.
void read_experts(const ConfigSettings& settings, ModelConfig& config) {
  const std::string_view type = config.architecture->model_type;
  if (type != "qwen3_moe" && type != "mixtral" && type != "gpt_oss") return;
  const std::string_view key =
      settings.find("num_experts") != nullptr ? "num_experts" : "num_local_experts";
  config.experts = settings.count(key);
  config.experts_used = settings.count("num_experts_per_tok");
  if (config.experts_used > config.experts) {
    settings.fail("num_experts_per_tok is " + std::to_string(config.experts_used) + ", of " +
                  std::to_string(config.experts) + " experts");
  }
  config.expert_intermediate =
      type == "qwen3_moe" ? settings.count("moe_intermediate_size") : config.intermediate;
  if (type != "qwen3_moe") return;
  if (!settings.flag("norm_topk_prob", false)) {
    settings.fail("norm_topk_prob is " + ConfigSettings::shown(settings.find("norm_topk_prob")) +
                  ", wanted true: llama.cpp always normalises the weights of the chosen experts");
  }
  if (const std::uint64_t step = settings.count("decoder_sparse_step", 1); step != 1) {
    settings.fail("decoder_sparse_step is " + std::to_string(step) +
                  ", wanted 1: llama.cpp has experts in every layer");
  }
  const Value* dense = settings.find("mlp_only_layers");
  if (dense != nullptr && (!dense->is(Kind::kArray) || !dense->items().empty())) {
    settings.fail("mlp_only_layers is " + ConfigSettings::shown(dense) +
                  ", wanted []: llama.cpp has experts in every layer");
  }
}

}  // namespace

ModelConfig read_model_config(const Value& json, std::string_view source) {
  const ConfigSettings settings(json, source);
  ModelConfig config;
  config.architecture = &architecture_of(settings);
  const Defaults* defaults = kDefaults.data();
  for (const Defaults& row : kDefaults) {
    if (row.name == config.architecture->name || row.name == config.architecture->model_type) {
      defaults = &row;
    }
  }
  config.layers = settings.count("num_hidden_layers");
  config.hidden = settings.count("hidden_size");
  config.intermediate = settings.count("intermediate_size");
  config.heads = settings.count("num_attention_heads", defaults->heads);
  config.kv_heads = settings.count("num_key_value_heads",
                                   defaults->kv_heads != 0 ? defaults->kv_heads : config.heads);
  config.head_dim = settings.count(
      "head_dim", defaults->head_dim != 0 ? defaults->head_dim : config.hidden / config.heads);
  config.vocabulary = settings.count("vocab_size", defaults->vocabulary);
  config.context = settings.count("max_position_embeddings", defaults->context);
  config.norm_epsilon = settings.number("rms_norm_eps", defaults->norm_epsilon);
  config.tied = settings.flag("tie_word_embeddings", defaults->tied);
  if (config.head_dim % 2 != 0 || config.heads % config.kv_heads != 0) {
    settings.fail("head_dim " + std::to_string(config.head_dim) +
                  " must be even and num_attention_heads " + std::to_string(config.heads) +
                  " a multiple of num_key_value_heads " + std::to_string(config.kv_heads));
  }
  const std::string_view activation = settings.text(
      settings.find("hidden_activation") != nullptr ? "hidden_activation" : "hidden_act",
      defaults->activation);
  if (activation != defaults->activation) {
    settings.fail("hidden_act is " + text::in_quotes(activation) + ", llama.cpp has " +
                  text::in_quotes(defaults->activation));
  }
  if (config.is_phi() && config.head_dim * config.heads != config.hidden) {
    settings.fail("head_dim " + std::to_string(config.head_dim) + " of " +
                  std::to_string(config.heads) + " heads is not hidden_size " +
                  std::to_string(config.hidden) + ", as llama.cpp has it for phi3");
  }
  config.rope = read_rope(settings, config, defaults->rope_theta);
  settings.must_be_off("use_sliding_window");
  read_experts(settings, config);
  if (config.is_gemma()) {
    read_gemma(settings, settings.find("rope_parameters"), config);
  } else if (config.is_gpt_oss()) {
    read_gpt_oss(settings, config);
  } else if (config.is_phi()) {
    read_phi(settings, config);
  } else if ((config.architecture->model_type == "mistral" ||
              config.architecture->model_type == "mixtral") &&
             settings.find("sliding_window") != nullptr) {
    config.notes.push_back("llama.cpp has no sliding window for Mistral and Mixtral: beyond " +
                           std::to_string(settings.count("sliding_window")) +
                           " tokens it sees more than transformers does");
  }
  return config;
}

}  // namespace monograph::gguf
