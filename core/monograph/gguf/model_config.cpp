#include "monograph/gguf/model_config.h"

#include <array>
#include <limits>

#include "monograph/base/error.h"
#include "monograph/text/utf8.h"
#include "monograph/weights/model_settings.h"

namespace monograph::gguf {
namespace {

using json::Kind;
using json::Value;

// What transformers takes where config.json says nothing.
struct Defaults {
  std::string_view name;  // of the architecture, or below them of a model type of its own
  std::uint64_t heads, kv_heads, head_dim, vocabulary, context;  // 0: must be there, or follows
  double rope_theta;
  bool tied;
  std::string_view activation;
};
constexpr std::array kDefaults = {
    Defaults{"llama", 0, 0, 0, 0, 0, 10000, false, "silu"},
    Defaults{"qwen3", 0, 0, 128, 0, 0, 10000, false, "silu"},
    Defaults{"gemma3", 8, 4, 256, 262208, 131072, 1000000, true, "gelu_pytorch_tanh"},
    Defaults{"qwen3moe", 0, 4, 0, 0, 0, 10000, false, "silu"},
    Defaults{"mixtral", 0, 8, 0, 0, 0, 1000000, false, "silu"},
};

class Settings {
 public:
  Settings(const Value& config, std::string_view source) : config_(config), source_(source) {}

  const Value* find(std::string_view key) const { return find_setting(config_, key); }

  std::uint64_t count(std::string_view key, std::uint64_t otherwise = 0) const {
    const Value* value = find(key);
    if (value == nullptr && otherwise != 0) return otherwise;
    const std::uint64_t number = value == nullptr ? 0 : value->as_unsigned().value_or(0);
    if (number == 0 || number > std::numeric_limits<std::uint32_t>::max()) {
      fail(std::string(key) + " is " + shown(value) + ", wanted a number from 1 to 2^32 - 1");
    }
    return number;
  }

  double number(std::string_view key, double otherwise) const {
    const Value* value = find(key);
    return value == nullptr ? otherwise : positive(key, value);
  }

  double positive(std::string_view key, const Value* value) const {
    const double number = value == nullptr ? 0 : value->as_double().value_or(0);
    if (!(number > 0) || number > std::numeric_limits<float>::max()) {
      fail(std::string(key) + " is " + shown(value) + ", wanted a positive number");
    }
    return number;
  }

  bool flag(std::string_view key, bool otherwise) const {
    const Value* value = find(key);
    return value == nullptr ? otherwise : value->as_bool().value_or(otherwise);
  }

  std::string_view text(std::string_view key, std::string_view otherwise = {}) const {
    const Value* value = find(key);
    return value == nullptr ? otherwise : value->as_string().value_or("");
  }

  // Throws unless the setting is absent, false, 0 or 1 as `off` says.
  void must_be_off(std::string_view key) const {
    const Value* value = find(key);
    if (value != nullptr && value->as_bool().value_or(true)) {
      fail(std::string(key) + " is " + shown(value) + ": llama.cpp has nothing for it here");
    }
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(std::string(source_) + ": " + what);
  }

  static std::string shown(const Value* value) {
    return value == nullptr ? "missing" : text::in_quotes(json::dump_line(*value));
  }

 private:
  const Value& config_;
  std::string_view source_;
};

const Architecture& architecture_of(const Settings& settings) {
  const std::string_view type = settings.text("model_type");
  const Architecture* found = find_architecture(type);
  if (found == nullptr || found->exported == Exported::kNo) {
    settings.fail("model_type is " + text::in_quotes(type) + ", export to GGUF knows " +
                  exported_model_types());
  }
  return *found;
}

Rope read_rope(const Settings& settings, const Value* parameters, const Value* scaling,
               double theta, std::uint64_t context) {
  Rope rope;
  rope.theta = theta;
  const Value* all = scaling != nullptr ? scaling : parameters;
  if (all == nullptr) return rope;
  if (!all->is(Kind::kObject)) {
    settings.fail("rope_scaling is " + Settings::shown(all) + ", wanted an object");
  }
  const auto get = [&](std::string_view key) {
    const Value* value = all->find(key);
    return value == nullptr || value->is(Kind::kNull) ? nullptr : value;
  };
  const Value* type = get("rope_type") != nullptr ? get("rope_type") : get("type");
  const std::string_view name = type == nullptr ? "default" : type->as_string().value_or("");
  if (const Value* part = get("partial_rotary_factor")) {
    if (part->as_double().value_or(0) != 1) {
      settings.fail("partial_rotary_factor is " + Settings::shown(part) + ", wanted 1");
    }
  }
  if (name == "default") return rope;
  rope.factor = settings.positive("rope_scaling.factor", get("factor"));
  if (name == "linear") {
    rope.scaling = RopeScaling::kLinear;
    return rope;
  }
  if (name != "llama3" && name != "yarn") {
    settings.fail("rope_type is " + text::in_quotes(name) +
                  ", export to GGUF knows default, linear, llama3, yarn");
  }
  const Value* original = get("original_max_position_embeddings");
  rope.original_context = original == nullptr ? 0 : original->as_unsigned().value_or(0);
  if (rope.original_context == 0 && name == "yarn") rope.original_context = context;
  if (rope.original_context == 0) {
    settings.fail("rope_scaling.original_max_position_embeddings is " + Settings::shown(original) +
                  ", wanted a number above 0");
  }
  if (name == "yarn") {
    rope.scaling = RopeScaling::kYarn;
    // llama.cpp has the usual ones.
    for (const std::string_view key : {"attention_factor", "mscale", "mscale_all_dim"}) {
      if (get(key) != nullptr)
        settings.fail("rope_scaling." + std::string(key) + " is set: wanted none");
    }
    const auto usual = [&](std::string_view key, double wanted) {
      const Value* value = get(key);
      if (value != nullptr && value->as_double().value_or(0) != wanted) {
        settings.fail("rope_scaling." + std::string(key) + " is " + Settings::shown(value) +
                      ", wanted " + std::to_string(static_cast<int>(wanted)));
      }
    };
    usual("beta_fast", 32);
    usual("beta_slow", 1);
    const Value* truncated = get("truncate");
    if (truncated != nullptr && !truncated->as_bool().value_or(false)) {
      settings.fail("rope_scaling.truncate is " + Settings::shown(truncated) + ", wanted true");
    }
    return rope;
  }
  rope.scaling = RopeScaling::kLlama3;
  rope.low_freq_factor = settings.positive("rope_scaling.low_freq_factor", get("low_freq_factor"));
  rope.high_freq_factor =
      settings.positive("rope_scaling.high_freq_factor", get("high_freq_factor"));
  if (rope.high_freq_factor <= rope.low_freq_factor) {
    settings.fail("rope_scaling.high_freq_factor is not above low_freq_factor");
  }
  return rope;
}

// The base of a set of rope_parameters, else of the key that came before them.
double theta_of(const Settings& settings, const Value* parameters, std::string_view key,
                double otherwise) {
  const Value* theta = parameters == nullptr ? nullptr : parameters->find("rope_theta");
  return theta == nullptr ? settings.number(key, otherwise)
                          : settings.positive("rope_theta", theta);
}

void read_gemma(const Settings& settings, const Value* parameters, ModelConfig& config) {
  const Value* local = parameters == nullptr ? nullptr : parameters->find("sliding_attention");
  const double local_theta = theta_of(settings, local, "rope_local_base_freq", kGemmaLocalTheta);
  if (local_theta != kGemmaLocalTheta) {
    settings.fail("the base of the rotary embedding of sliding layers is " +
                  std::to_string(local_theta) + ", llama.cpp has 10000");
  }
  if (const Value* type = local == nullptr ? nullptr : local->find("rope_type")) {
    if (type->as_string().value_or("") != "default") {
      settings.fail("rope_type of sliding layers is " + Settings::shown(type) +
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
  const Value* types = settings.find("layer_types");
  for (std::uint64_t layer = 0; layer < config.layers; ++layer) {
    const bool full = (layer + 1) % kGemmaPeriod == 0;
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
                    " attention, llama.cpp has full attention in every sixth");
    }
  }
}

// Every layer has them in llama.cpp, and the weights of those that are chosen add up to 1.
void read_experts(const Settings& settings, ModelConfig& config) {
  const std::string_view type = config.architecture->model_type;
  if (type != "qwen3_moe" && type != "mixtral") return;
  const std::string_view key =
      settings.find("num_experts") != nullptr ? "num_experts" : "num_local_experts";
  config.experts = settings.count(key);
  config.experts_used = settings.count("num_experts_per_tok");
  if (config.experts_used > config.experts) {
    settings.fail("num_experts_per_tok is " + std::to_string(config.experts_used) + ", of " +
                  std::to_string(config.experts) + " experts");
  }
  config.expert_intermediate =
      type == "mixtral" ? config.intermediate : settings.count("moe_intermediate_size");
  if (type == "mixtral") return;
  if (!settings.flag("norm_topk_prob", false)) {
    settings.fail("norm_topk_prob is " + Settings::shown(settings.find("norm_topk_prob")) +
                  ", wanted true: llama.cpp always normalises the weights of the chosen experts");
  }
  if (const std::uint64_t step = settings.count("decoder_sparse_step", 1); step != 1) {
    settings.fail("decoder_sparse_step is " + std::to_string(step) +
                  ", wanted 1: llama.cpp has experts in every layer");
  }
  const Value* dense = settings.find("mlp_only_layers");
  if (dense != nullptr && (!dense->is(Kind::kArray) || !dense->items().empty())) {
    settings.fail("mlp_only_layers is " + Settings::shown(dense) +
                  ", wanted []: llama.cpp has experts in every layer");
  }
}

}  // namespace

ModelConfig read_model_config(const Value& json, std::string_view source) {
  const Settings settings(json, source);
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
  config.norm_epsilon = settings.number("rms_norm_eps", 1e-6);
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
  const Value* parameters = settings.find("rope_parameters");
  const Value* full = parameters == nullptr ? nullptr : parameters->find("full_attention");
  const Value* global = full != nullptr ? full : parameters;
  config.rope =
      read_rope(settings, global, settings.find("rope_scaling"),
                theta_of(settings, global, "rope_theta", defaults->rope_theta), config.context);
  settings.must_be_off("use_sliding_window");
  read_experts(settings, config);
  if (config.is_gemma()) {
    read_gemma(settings, parameters, config);
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
