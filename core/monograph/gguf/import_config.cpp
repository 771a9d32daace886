#include "monograph/gguf/import_config.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "monograph/base/error.h"
#include "monograph/gguf/decode_blocks.h"
#include "monograph/gguf/model_config.h"
#include "monograph/text/utf8.h"

namespace monograph::gguf {
namespace {

using json::Value;
using text::in_quotes;

struct Family {
  std::string_view architecture, model_type, model_class;
  bool query_bias;  // q, k and v have biases, whatever config.json says
};
constexpr std::array kFamilies = {
    Family{"llama", "llama", "LlamaForCausalLM", false},
    Family{"qwen2", "qwen2", "Qwen2ForCausalLM", true},
    Family{"qwen3", "qwen3", "Qwen3ForCausalLM", false},
    Family{"qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM", false},
    Family{"gemma3", "gemma3_text", "Gemma3ForCausalLM", false},
};

// Keys of an architecture that are read below, or that say what tensors say too.
constexpr std::array<std::string_view, 24> kKnown = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "tensor_data_layout",
    "quantization_version",
};

// The values that llama.cpp takes where a file has none.
constexpr double kTheta = 10000;

Value whole(std::uint64_t value) { return Value::number(static_cast<std::int64_t>(value)); }

// The decimal number of which `value` is the nearest float32: 1e-05, not 9.9999997e-06.
double shortest(double value) {
  std::array<char, 32> text{};
  const auto end =
      std::to_chars(text.data(), text.data() + text.size() - 1, static_cast<float>(value)).ptr;
  *end = 0;
  return std::strtod(text.data(), nullptr);
}

class Importer {
 public:
  Importer(const FileReader& file, DType dtype)
      : file_(file), header_(file.header()), dtype_(dtype), name_(header_.architecture()) {}

  Value make() {
    const auto* found = std::find_if(kFamilies.begin(), kFamilies.end(),
                                     [&](const Family& row) { return row.architecture == name_; });
    if (found == kFamilies.end()) {
      std::string known;
      for (const Family& row : kFamilies) {
        known += (known.empty() ? "" : ", ") + std::string(row.architecture);
      }
      fail("general.architecture " + in_quotes(name_) + ", known are " + known);
    }
    family_ = found;
    check_keys();
    read_sizes();
    add_model();
    add_biases();
    add_rope();
    if (family_->architecture == "qwen3moe") add_experts();
    if (is_gemma()) add_gemma();
    add_tokens();
    return std::move(config_);
  }

 private:
  bool is_gemma() const { return family_->architecture == "gemma3"; }

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(file_.path().string() + ": " + what);
  }

  std::string key_of(std::string_view key) const {
    return std::string(name_) + "." + std::string(key);
  }

  const PairView* find(std::string_view key) const { return header_.find(key_of(key)); }

  std::uint64_t count(std::string_view key, std::uint64_t otherwise = 0) const {
    const PairView* pair = find(key);
    if (pair == nullptr && otherwise != 0) return otherwise;
    const std::uint64_t found = pair == nullptr ? 0 : pair->whole().value_or(0);
    if (found == 0 || found > UINT32_MAX) {
      fail(key_of(key) + " is " + (pair == nullptr ? "missing" : std::to_string(found)) +
           ", wanted a number from 1 to 2^32 - 1");
    }
    return found;
  }

  double number(std::string_view key, double otherwise = 0) const {
    const PairView* pair = find(key);
    if (pair == nullptr && otherwise != 0) return otherwise;
    const double found = pair == nullptr ? 0 : pair->number().value_or(0);
    if (!(found > 0) || !std::isfinite(found)) {
      fail(key_of(key) + " is " + (pair == nullptr ? "missing" : std::to_string(found)) +
           ", wanted a positive number");
    }
    return pair->type == ValueType::kF64 ? found : shortest(found);
  }

  void check_keys() const {
    const std::string begin = key_of("");
    for (const PairView& pair : header_.pairs) {
      if (!pair.key.starts_with(begin)) continue;
      const std::string_view rest = pair.key.substr(begin.size());
      if (std::find(kKnown.begin(), kKnown.end(), rest) == kKnown.end()) {
        fail("key " + in_quotes(pair.key) + ": transformers' " + std::string(family_->model_type) +
             " has no setting for it that is known");
      }
    }
  }

  const TensorInfo& tensor(const std::string& name, std::size_t dimensions) const {
    const TensorInfo* found = header_.find_tensor(name);
    if (found == nullptr || found->shape.size() != dimensions) {
      fail("tensor " + in_quotes(name) + " is " +
           (found == nullptr ? "missing" : "of " + std::to_string(found->shape.size())) +
           ", wanted one of " + std::to_string(dimensions) + " dimensions");
    }
    return *found;
  }

  void must_be(const std::string& what, std::uint64_t found, std::uint64_t wanted) const {
    if (found == wanted) return;
    fail(what + " is " + std::to_string(found) + ", by the tensors " + std::to_string(wanted));
  }

  void read_sizes() {
    const TensorInfo& embedding = tensor("token_embd.weight", 2);
    vocabulary_ = embedding.shape[0];
    hidden_ = count("embedding_length");
    layers_ = count("block_count");
    heads_ = count("attention.head_count");
    kv_heads_ = count("attention.head_count_kv", heads_);
    head_dim_ = count("attention.key_length", std::max<std::uint64_t>(hidden_ / heads_, 1));
    must_be(key_of("embedding_length"), hidden_, embedding.shape[1]);
    must_be(key_of("vocab_size"), count("vocab_size", vocabulary_), vocabulary_);
    must_be(key_of("attention.value_length"), count("attention.value_length", head_dim_),
            head_dim_);
    must_be(key_of("rope.dimension_count"), count("rope.dimension_count", head_dim_), head_dim_);
    must_be("rows of heads", heads_ * head_dim_, tensor("blk.0.attn_q.weight", 2).shape[0]);
    must_be("rows of heads of keys", kv_heads_ * head_dim_,
            tensor("blk.0.attn_k.weight", 2).shape[0]);
    const std::string last = "blk." + std::to_string(layers_) + ".";
    for (const TensorInfo& info : header_.tensors) {
      if (info.name.starts_with(last)) fail("tensor " + in_quotes(info.name) + " is one too many");
    }
    tensor("blk." + std::to_string(layers_ - 1) + ".attn_q.weight", 2);
  }

  void add_model() {
    Value& classes = config_.set("architectures", Value::array());
    classes.append(Value::string(family_->model_class));
    config_.set("model_type", Value::string(family_->model_type));
    config_.set("hidden_size", whole(hidden_));
    intermediate_ =
        count("feed_forward_length", family_->architecture == "qwen3moe" ? 3 * hidden_ : 0);
    if (family_->architecture != "qwen3moe") {
      must_be(key_of("feed_forward_length"), intermediate_,
              tensor("blk.0.ffn_up.weight", 2).shape[0]);
    }
    config_.set("intermediate_size", whole(intermediate_));
    config_.set("num_hidden_layers", whole(layers_));
    config_.set("num_attention_heads", whole(heads_));
    config_.set("num_key_value_heads", whole(kv_heads_));
    // Qwen2 computes it.
    if (family_->architecture != "qwen2" || head_dim_ * heads_ != hidden_) {
      config_.set("head_dim", whole(head_dim_));
    }
    config_.set("vocab_size", whole(vocabulary_));
    config_.set("max_position_embeddings", whole(count("context_length")));
    config_.set("rms_norm_eps", Value::number(number("attention.layer_norm_rms_epsilon")));
    config_.set("tie_word_embeddings",
                Value::boolean(header_.find_tensor("output.weight") == nullptr));
    config_.set(is_gemma() ? "hidden_activation" : "hidden_act",
                Value::string(is_gemma() ? "gelu_pytorch_tanh" : "silu"));
    config_.set("attention_dropout", Value::number(0.0));
    config_.set("use_cache", Value::boolean(true));
    config_.set("torch_dtype", Value::string(name_of(dtype_)));
  }

  bool has(const char* of_first_layer) const {
    return header_.find_tensor("blk.0." + std::string(of_first_layer) + ".bias") != nullptr;
  }

  void add_biases() {
    const bool query = has("attn_q"), output = has("attn_output");
    const bool down = has("ffn_down"), up = has("ffn_up");
    if (query != has("attn_k") || query != has("attn_v") || down != up || up != has("ffn_gate")) {
      fail("blk.0 has some biases and not others, as no model of transformers");
    }
    if (family_->query_bias) {
      if (!query || output || down) {
        fail("biases of blk.0 are not those of " + std::string(family_->model_type));
      }
      return;
    }
    const bool mlp = family_->architecture == "llama";
    if (query != output || (down && !mlp)) {
      fail("biases of blk.0 are not those of " + std::string(family_->model_type));
    }
    config_.set("attention_bias", Value::boolean(query));
    if (mlp) config_.set("mlp_bias", Value::boolean(down));
  }

  void add_rope() {
    const double theta = number("rope.freq_base", kTheta);
    config_.set("rope_theta", Value::number(theta));
    const PairView* type = find("rope.scaling.type");
    const std::string_view kind = type == nullptr ? "none" : type->text().value_or("");
    const TensorInfo* factors = header_.find_tensor("rope_freqs.weight");
    Value scaling;
    if (factors != nullptr) {
      if (kind != "none") fail("rope_freqs.weight beside a rope.scaling.type " + in_quotes(kind));
      scaling = llama3(*factors, theta);
    } else if (kind == "linear" || kind == "yarn") {
      scaling.set("rope_type", Value::string(kind));
      scaling.set("factor", Value::number(number("rope.scaling.factor")));
      if (kind == "yarn") {
        scaling.set("original_max_position_embeddings",
                    whole(count("rope.scaling.original_context_length")));
      }
    } else if (kind != "none") {
      fail(key_of("rope.scaling.type") + " is " + in_quotes(kind) +
           ", known are none, linear, yarn");
    }
    config_.set("rope_scaling", std::move(scaling));
  }

  // The file has what each frequency is divided by, config.json what that follows from. Of Llama's
  // own settings the ones that give these numbers; none else is guessed.
  Value llama3(const TensorInfo& info, double theta) const {
    if (info.type != TensorType::kF32 || info.shape.size() != 1 || info.shape[0] != head_dim_ / 2) {
      fail("rope_freqs.weight: wanted " + std::to_string(head_dim_ / 2) + " numbers of f32");
    }
    std::vector<float> found(info.shape[0]);
    decode(TensorType::kF32, file_.bytes(info).data(), found.size(), found.data());
    ModelConfig model;
    model.head_dim = head_dim_;
    model.rope.scaling = RopeScaling::kLlama3;
    model.rope.theta = theta;
    model.rope.factor = shortest(*std::max_element(found.begin(), found.end()));
    model.rope.low_freq_factor = 1;
    model.rope.high_freq_factor = 4;
    const PairView* original = find("rope.scaling.original_context_length");
    for (std::uint64_t context = 16; context <= 1048576; context *= 2) {
      model.rope.original_context =
          original == nullptr ? context : count("rope.scaling.original_context_length");
      const std::vector<float> wanted = rope_factors(model);
      // Producers compute them in float32.
      const auto near = [](float a, float b) { return std::fabs(a - b) <= 1e-4f * std::fabs(b); };
      if (!std::equal(found.begin(), found.end(), wanted.begin(), near)) continue;
      Value value;
      value.set("rope_type", Value::string("llama3"));
      value.set("factor", Value::number(model.rope.factor));
      value.set("low_freq_factor", Value::number(1.0));
      value.set("high_freq_factor", Value::number(4.0));
      value.set("original_max_position_embeddings", whole(model.rope.original_context));
      return value;
    }
    fail(
        "rope_freqs.weight: its numbers are not those of a llama3 scaling with low_freq_factor 1 "
        "and high_freq_factor 4");
  }

  void add_experts() {
    const std::uint64_t experts = count("expert_count");
    const TensorInfo& up = tensor("blk.0.ffn_up_exps.weight", 3);
    must_be(key_of("expert_count"), experts, up.shape[0]);
    must_be(key_of("expert_feed_forward_length"), count("expert_feed_forward_length", up.shape[1]),
            up.shape[1]);
    for (std::uint64_t layer = 0; layer < layers_; ++layer) {
      tensor("blk." + std::to_string(layer) + ".ffn_up_exps.weight", 3);
    }
    config_.set("num_experts", whole(experts));
    config_.set("num_experts_per_tok", whole(count("expert_used_count")));
    config_.set("moe_intermediate_size", whole(up.shape[1]));
    config_.set("norm_topk_prob", Value::boolean(true));  // always, in llama.cpp
    config_.set("decoder_sparse_step", whole(1));
    config_.set("mlp_only_layers", Value::array());
  }

  void add_gemma() {
    const PairView* pattern = find("attention.sliding_window_pattern");
    const std::uint64_t period = pattern == nullptr ? kGemmaPeriod : pattern->whole().value_or(0);
    if (period == 0) fail(key_of("attention.sliding_window_pattern") + ": wanted a number above 0");
    Value& types = config_.set("layer_types", Value::array());
    for (std::uint64_t layer = 1; layer <= layers_; ++layer) {
      types.append(Value::string(layer % period == 0 ? "full_attention" : "sliding_attention"));
    }
    config_.set("sliding_window", whole(count("attention.sliding_window")));
    config_.set("rope_local_base_freq",
                Value::number(number("rope.freq_base_swa", kGemmaLocalTheta)));
    config_.set("query_pre_attn_scalar",
                whole(layers_ == kGemma27BLayers ? hidden_ / heads_ : head_dim_));
    config_.set("attn_logit_softcapping", Value());
    config_.set("final_logit_softcapping", Value());
  }

  void add_tokens() {
    for (const auto& [key, setting] :
         {std::pair("tokenizer.ggml.bos_token_id", "bos_token_id"),
          std::pair("tokenizer.ggml.eos_token_id", "eos_token_id"),
          std::pair("tokenizer.ggml.padding_token_id", "pad_token_id")}) {
      const PairView* pair = header_.find(key);
      const std::optional<std::uint64_t> id = pair == nullptr ? std::nullopt : pair->whole();
      if (pair != nullptr && (!id || *id >= vocabulary_)) {
        fail(std::string(key) + " is no row of the embedding, which has " +
             std::to_string(vocabulary_));
      }
      config_.set(setting, id ? whole(*id) : Value());
    }
  }

  const FileReader& file_;
  const FileHeader& header_;
  DType dtype_;
  std::string_view name_;
  const Family* family_ = nullptr;
  std::uint64_t hidden_ = 0, layers_ = 0, heads_ = 0, kv_heads_ = 0, head_dim_ = 0;
  std::uint64_t vocabulary_ = 0, intermediate_ = 0;
  Value config_;
};

}  // namespace

Value import_config(const FileReader& file, DType dtype) { return Importer(file, dtype).make(); }

}  // namespace monograph::gguf
