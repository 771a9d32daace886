#include "monograph/train/model_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <set>
#include <span>

#include "monograph/base/error.h"

namespace monograph::train {
namespace {

constexpr std::size_t kMostLayers = 10000;

// Say nothing about a training step, whatever they are.
constexpr std::array kHarmless = {
    "_name_or_path",        "architectures",
    "bos_token_id",         "dtype",
    "eos_token_id",         "id2label",
    "initializer_range",    "label2id",
    "model_type",           "output_attentions",
    "output_hidden_states", "pad_token_id",
    "problem_type",         "quantization_config",
    "return_dict",          "torch_dtype",
    "transformers_version", "use_cache",
};

// The keys of one object, each asked for at most once or twice; `finish` refuses what nobody asked
// for.
class Keys {
 public:
  Keys(const json::Value& object, std::string_view source) : object_(object), source_(source) {
    if (!object.is(json::Kind::kObject)) throw Error(source_ + ": wanted an object");
  }

  // nullptr if it is absent or null.
  const json::Value* find(std::string_view key) {
    asked_.insert(std::string(key));
    const json::Value* value = object_.find(key);
    return value == nullptr || value->is(json::Kind::kNull) ? nullptr : value;
  }
  bool has(std::string_view key) const { return object_.find(key) != nullptr; }

  std::size_t count(std::string_view key, std::optional<std::size_t> otherwise = {}) {
    const json::Value* value = find(key);
    if (value == nullptr && otherwise) return *otherwise;
    const std::optional<std::uint64_t> found = value ? value->as_unsigned() : std::nullopt;
    if (!found || *found == 0 || *found > (1u << 30))
      fail(key, value, "a whole number from 1 to 2^30");
    return static_cast<std::size_t>(*found);
  }
  double number(std::string_view key, std::optional<double> otherwise = {}) {
    const json::Value* value = find(key);
    if (value == nullptr && otherwise) return *otherwise;
    const std::optional<double> found = value ? value->as_double() : std::nullopt;
    if (!found || !std::isfinite(*found) || *found < 0) fail(key, value, "a number, 0 or more");
    return *found;
  }
  bool flag(std::string_view key, bool otherwise) {
    const json::Value* value = find(key);
    if (value == nullptr) return otherwise;
    const std::optional<bool> found = value->as_bool();
    if (!found) fail(key, value, "true or false");
    return *found;
  }
  // Absent, null, or this.
  void must_be(std::string_view key, std::string_view wanted) {
    const json::Value* value = find(key);
    if (value != nullptr && shown(*value) != wanted) fail(key, value, std::string(wanted));
  }

  void finish(std::span<const char* const> harmless) const {
    for (const json::Member& member : object_.members()) {
      const bool known = asked_.contains(member.key) ||
                         std::find(harmless.begin(), harmless.end(), member.key) != harmless.end();
      if (!known)
        throw Error(
            source_ + ": " + member.key +
            " is not a key that the native trainer knows, wanted the keys of Llama, Mistral, Qwen2 "
            "and Qwen3");
    }
  }

  [[noreturn]] void fail(std::string_view key, const json::Value* value,
                         const std::string& wanted) const {
    throw Error(source_ + ": " + std::string(key) + " is " +
                (value == nullptr ? "missing" : shown(*value)) + ", wanted " + wanted);
  }
  static std::string shown(const json::Value& value) {
    if (value.is(json::Kind::kString)) return value.text();
    // 0 and 0.0 are one number.
    if (value.is(json::Kind::kNumber) && value.as_double() == 0.0) return "0";
    return json::dump_line(value);
  }

 private:
  const json::Value& object_;
  std::string source_;
  std::set<std::string> asked_;
};

RopeScaling read_scaling(const json::Value& object, const std::string& source,
                         std::optional<double> theta) {
  Keys keys(object, source);
  RopeScaling rope;
  rope.theta = keys.number("rope_theta", theta);
  const json::Value* kind = keys.find("rope_type");
  if (const json::Value* older = keys.find("type"); kind == nullptr) kind = older;
  const std::string name = kind == nullptr ? "default" : Keys::shown(*kind);
  keys.must_be("partial_rotary_factor", "1.0");
  if (name == "linear" || name == "llama3") rope.factor = keys.number("factor");
  if (name == "linear") {
    rope.kind = RopeKind::kLinear;
  } else if (name == "llama3") {
    rope.kind = RopeKind::kLlama3;
    rope.low_frequency = keys.number("low_freq_factor");
    rope.high_frequency = keys.number("high_freq_factor");
    rope.original_positions = keys.number("original_max_position_embeddings");
  } else if (name != "default") {
    keys.fail("rope_type", kind, "default, linear or llama3");
  }
  keys.finish({});
  return rope;
}

// As transformers 5 writes it, `rope_parameters`, or as before: rope_theta and rope_scaling.
RopeScaling read_rope(Keys& keys, const std::string& source, bool theta_may_be_missing) {
  if (const json::Value* parameters = keys.find("rope_parameters")) {
    keys.must_be("rope_scaling", "null");
    return read_scaling(*parameters, source + ": rope_parameters", {});
  }
  const double theta = keys.number(
      "rope_theta", theta_may_be_missing ? std::optional<double>(10000.0) : std::nullopt);
  if (const json::Value* scaling = keys.find("rope_scaling"))
    return read_scaling(*scaling, source + ": rope_scaling", theta);
  RopeScaling rope;
  rope.theta = theta;
  return rope;
}

// What transformers makes of sliding_window, use_sliding_window, max_window_layers and layer_types.
std::vector<std::int64_t> read_windows(Keys& keys, const ModelConfig& model) {
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
  const json::Value* const types = keys.find("layer_types");
  const std::int64_t window =
      used && value != nullptr ? static_cast<std::int64_t>(keys.count("sliding_window")) : 0;
  if (types != nullptr && types->items().size() != model.layers)
    keys.fail("layer_types", types,
              "one entry for each of " + std::to_string(model.layers) + " layers");
  for (std::size_t i = 0; i < model.layers; ++i) {
    bool sliding = static_cast<double>(i) >= full;
    if (types != nullptr) {
      const std::string type = Keys::shown(types->items()[i]);
      sliding = type == "sliding_attention";
      if (!sliding && type != "full_attention")
        keys.fail("layer_types", &types->items()[i], "full_attention or sliding_attention");
    }
    if (sliding && types != nullptr && window == 0)
      keys.fail("sliding_window", value,
                "a number of tokens, for layer_types names sliding_attention");
    windows[i] = sliding ? window : 0;
  }
  return windows;
}

}  // namespace

ModelConfig read_model_config(const json::Value& config, std::string_view source) {
  Keys keys(config, source);
  ModelConfig model;
  const json::Value* const type = keys.find("model_type");
  model.family = type == nullptr ? "" : Keys::shown(*type);
  const bool llama = model.family == "llama", mistral = model.family == "mistral";
  const bool qwen2 = model.family == "qwen2", qwen3 = model.family == "qwen3";
  if (!llama && !mistral && !qwen2 && !qwen3)
    keys.fail("model_type", type, "llama, mistral, qwen2 or qwen3");
  model.width = keys.count("hidden_size");
  model.inner = keys.count("intermediate_size");
  model.layers = keys.count("num_hidden_layers");
  if (model.layers > kMostLayers)
    keys.fail("num_hidden_layers", keys.find("num_hidden_layers"), "10000 at most");
  model.heads = keys.count("num_attention_heads");
  // Where the class has another number, the key must be there.
  model.kv_heads =
      llama ? keys.count("num_key_value_heads", model.heads) : keys.count("num_key_value_heads");
  // Qwen3's heads are 128 wide unless the config says another width.
  model.head_size = keys.count("head_dim", qwen3 ? 128 : model.width / model.heads);
  model.vocabulary = keys.count("vocab_size");
  if (keys.find("max_position_embeddings") != nullptr)
    model.positions = keys.count("max_position_embeddings");
  model.eps = static_cast<float>(keys.number("rms_norm_eps"));
  model.rope = read_rope(keys, std::string(source), llama);
  model.tied = keys.flag("tie_word_embeddings", false);
  keys.must_be("hidden_act", "silu");
  keys.must_be("attention_dropout", "0");
  keys.must_be("chunk_size_feed_forward", "0");
  keys.must_be("is_encoder_decoder", "false");
  if (llama) keys.must_be("pretraining_tp", "1");
  const bool biased = (llama || qwen3) && keys.flag("attention_bias", false);
  model.qkv_bias = qwen2 || biased;
  model.out_bias = biased;
  model.mlp_bias = llama && keys.flag("mlp_bias", false);
  model.head_norms = qwen3;
  model.windows = read_windows(keys, model);
  keys.finish(kHarmless);
  if (model.heads % model.kv_heads != 0)
    throw Error(std::string(source) + ": num_key_value_heads is " + std::to_string(model.kv_heads) +
                ", wanted a divisor of num_attention_heads, " + std::to_string(model.heads));
  if (model.head_size % 2 != 0 || model.head_size > 512)
    throw Error(std::string(source) + ": head_dim is " + std::to_string(model.head_size) +
                ", wanted an even number up to 512");
  return model;
}

}  // namespace monograph::train
