#include "monograph/gguf/import_config.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "monograph/base/error.h"
#include "monograph/gguf/decode_blocks.h"
#include "monograph/gguf/import_keys.h"
#include "monograph/gguf/import_rope.h"
#include "monograph/gguf/import_tensors.h"
#include "monograph/gguf/model_config.h"
#include "monograph/text/utf8.h"

namespace monograph::gguf {
namespace {

using json::Value;
using text::in_quotes;

struct Family {
  std::string_view architecture, model_type, model_class;
  bool query_bias;  // q, k and v have biases, whatever config.json says
  bool head_norms;  // of queries and keys
  bool experts = false;
};
constexpr std::array kFamilies = {
    Family{"llama", "llama", "LlamaForCausalLM", false, false},
    Family{"llama", "mixtral", "MixtralForCausalLM", false, false, true},
    Family{"qwen2", "qwen2", "Qwen2ForCausalLM", true, false},
    Family{"qwen3", "qwen3", "Qwen3ForCausalLM", false, true},
    Family{"qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM", false, true, true},
    Family{"gemma3", "gemma3_text", "Gemma3ForCausalLM", false, true},
    Family{"phi3", "phi3", "Phi3ForCausalLM", false, false},
    Family{"gpt-oss", "gpt_oss", "GptOssForCausalLM", false, false, true},
};

// Constants of llama.cpp's graph of gpt-oss: no file has them.
constexpr double kGptOssAlpha = 1.702, kGptOssLimit = 7;
constexpr std::uint64_t kGptOssPeriod = 2;  // the last layer of a period sees everything

// Keys of an architecture that are read below, or that say what tensors say too.
constexpr std::array<std::string_view, 27> kKnown = {
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
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "tensor_data_layout",
    "quantization_version",
};

class Importer : ArchitectureKeys {
 public:
  Importer(const FileReader& file, DType dtype)
      : ArchitectureKeys(file), dtype_(dtype), name_(header_.architecture()) {}

  Value make() {
    find_family();
    check_keys();
    read_sizes();
    add_model();
    if (!is_phi()) add_biases();
    is_phi() ? add_phi_rope(config_, *this, head_dim_) : add_rope(config_, *this, head_dim_);
    if (is_phi()) add_phi();
    if (family_->architecture == "qwen3moe") add_experts();
    if (is_mixtral()) add_mixtral();
    if (is_gpt_oss()) add_gpt_oss();
    if (is_gemma()) add_gemma();
    add_tokens();
    check_tensors(file_, {.vocabulary = vocabulary_,
                          .hidden = hidden_,
                          .layers = layers_,
                          .heads = heads_,
                          .kv_heads = kv_heads_,
                          .head_dim = head_dim_,
                          .intermediate = intermediate_,
                          .experts = experts_,
                          .expert_intermediate = expert_intermediate_,
                          .query_bias = has("attn_q"),
                          .output_bias = has("attn_output"),
                          .mlp_bias = has("ffn_up"),
                          .head_norms = family_->head_norms,
                          .norms_behind = is_gemma(),
                          .fused = is_phi(),
                          .gpt_oss = is_gpt_oss()});
    return std::move(config_);
  }

 private:
  bool is_gemma() const { return family_->architecture == "gemma3"; }
  bool is_phi() const { return family_->architecture == "phi3"; }
  bool is_gpt_oss() const { return family_->architecture == "gpt-oss"; }
  bool is_mixtral() const { return family_->model_type == "mixtral"; }

  // Of llama the number of experts tells Mixtral.
  void find_family() {
    const PairView* experts = find("expert_count");
    const bool mixtral = name_ == "llama" && experts != nullptr && experts->whole() != 0;
    std::string known;
    for (const Family& row : kFamilies) {
      const bool of_mixtral = row.model_type == "mixtral";
      if (row.architecture == name_ && of_mixtral == mixtral) family_ = &row;
      if (!of_mixtral) known += (known.empty() ? "" : ", ") + std::string(row.architecture);
    }
    if (family_ != nullptr) return;
    fail("general.architecture " + in_quotes(name_) + ", known are " + known);
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
      if (rest == "rope.scaling.attn_factor" && !is_phi() && pair.number() != 1) {
        fail(std::string(pair.key) + ": transformers' " + std::string(family_->model_type) +
             " has no setting for it");
      }
      if (rest.starts_with("rope.scaling.yarn_") && !is_gpt_oss()) {
        fail(std::string(pair.key) + ": is read for gpt-oss alone");
      }
      if (rest.starts_with("expert_") && !family_->experts && pair.whole() != 0) {
        fail(std::string(pair.key) + " is of a model with experts, which " + std::string(name_) +
             " is not here");
      }
    }
  }

  void read_sizes() {
    const TensorInfo& embedding = tensor("token_embd.weight", 2);
    vocabulary_ = embedding.shape[0];
    hidden_ = count("embedding_length");
    layers_ = count("block_count");
    if (layers_ > header_.tensors.size()) {  // each has several; below are loops over them
      fail(key_of("block_count") + " is " + std::to_string(layers_) + ", the file has " +
           std::to_string(header_.tensors.size()) + " tensors");
    }
    heads_ = count("attention.head_count");
    kv_heads_ = count("attention.head_count_kv", heads_);
    head_dim_ = count("attention.key_length", std::max<std::uint64_t>(hidden_ / heads_, 1));
    must_be(key_of("embedding_length"), hidden_, embedding.shape[1]);
    must_be(key_of("vocab_size"), count("vocab_size", vocabulary_), vocabulary_);
    must_be(key_of("attention.value_length"), count("attention.value_length", head_dim_),
            head_dim_);
    if (heads_ % kv_heads_ != 0) {
      fail(key_of("attention.head_count") + " is " + std::to_string(heads_) +
           ", wanted a multiple of head_count_kv, " + std::to_string(kv_heads_));
    }
    if (head_dim_ % 2 != 0) {
      fail(key_of("attention.key_length") + " is " + std::to_string(head_dim_) +
           ", wanted an even number: the rotary embedding turns pairs");
    }
    if (is_phi()) {
      must_be("head size", head_dim_, hidden_ / heads_);
      must_be("rows of heads", (heads_ + 2 * kv_heads_) * head_dim_,
              tensor("blk.0.attn_qkv.weight", 2).shape[0]);
      return;
    }
    must_be(key_of("rope.dimension_count"), count("rope.dimension_count", head_dim_), head_dim_);
    must_be("rows of heads", heads_ * head_dim_, tensor("blk.0.attn_q.weight", 2).shape[0]);
    must_be("rows of heads of keys", kv_heads_ * head_dim_,
            tensor("blk.0.attn_k.weight", 2).shape[0]);
  }

  void add_model() {
    Value& classes = config_.set("architectures", Value::array());
    classes.append(Value::string(family_->model_class));
    config_.set("model_type", Value::string(family_->model_type));
    config_.set("hidden_size", whole(hidden_));
    intermediate_ =
        is_gpt_oss()  // that of an expert; there is no other
            ? tensor("blk.0.ffn_up_exps.weight", 3).shape[1]
            : count("feed_forward_length", family_->experts && !is_mixtral() ? 3 * hidden_ : 0);
    if (!family_->experts) {
      must_be(key_of("feed_forward_length"), intermediate_,
              tensor("blk.0.ffn_up.weight", 2).shape[0] / (is_phi() ? 2 : 1));
    }
    config_.set("intermediate_size", whole(intermediate_));
    config_.set("num_hidden_layers", whole(layers_));
    config_.set("num_attention_heads", whole(heads_));
    config_.set("num_key_value_heads", whole(kv_heads_));
    // Qwen2 and Phi 3 compute it.
    const bool computed = family_->architecture == "qwen2" || is_phi();
    if (!computed || head_dim_ * heads_ != hidden_) {
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
    if (is_mixtral()) {
      if (query || output) fail("blk.0 has biases of attention, as no Mixtral has");
      return;
    }
    const bool mlp = family_->architecture == "llama";
    if (query != output || (down && !mlp)) {
      fail("biases of blk.0 are not those of " + std::string(family_->model_type));
    }
    if (is_gpt_oss() && !query) fail("blk.0 has no biases of attention, as every gpt-oss has");
    config_.set("attention_bias", Value::boolean(query));
    if (mlp) config_.set("mlp_bias", Value::boolean(down));
  }

  void add_phi() {
    const PairView* window = find("attention.sliding_window");
    const bool none = window == nullptr || window->whole() == 0;
    config_.set("sliding_window", none ? Value() : whole(count("attention.sliding_window")));
    config_.set("resid_pdrop", Value::number(0.0));
    config_.set("embd_pdrop", Value::number(0.0));
  }

  // The number of experts and of those that a token goes to.
  std::uint64_t read_experts() {
    const std::uint64_t experts = count("expert_count");
    const TensorInfo& up = tensor("blk.0.ffn_up_exps.weight", 3);
    must_be(key_of("expert_count"), experts, up.shape[0]);
    must_be(key_of("expert_feed_forward_length"), count("expert_feed_forward_length", up.shape[1]),
            up.shape[1]);
    experts_ = experts;
    expert_intermediate_ = up.shape[1];
    const std::uint64_t used = count("expert_used_count");
    if (used > experts) {
      fail(key_of("expert_used_count") + " is " + std::to_string(used) + ", of " +
           std::to_string(experts) + " experts");
    }
    return used;
  }

  void add_experts() {
    config_.set("num_experts_per_tok", whole(read_experts()));
    config_.set("num_experts", whole(experts_));
    config_.set("moe_intermediate_size", whole(expert_intermediate_));
    config_.set("norm_topk_prob", Value::boolean(true));  // always, in llama.cpp
    config_.set("decoder_sparse_step", whole(1));
    config_.set("mlp_only_layers", Value::array());
  }

  // Its experts have feed_forward_length in llama.cpp, whose graph has no sliding window.
  void add_mixtral() {
    config_.set("num_experts_per_tok", whole(read_experts()));
    config_.set("num_local_experts", whole(experts_));
    must_be(key_of("feed_forward_length"), intermediate_, expert_intermediate_);
    config_.set("sliding_window", Value());
  }

  void add_gpt_oss() {
    config_.set("num_experts_per_tok", whole(read_experts()));
    config_.set("num_local_experts", whole(experts_));
    config_.set("swiglu_alpha", Value::number(kGptOssAlpha));
    config_.set("swiglu_limit", Value::number(kGptOssLimit));
    if (find("rope.freq_base_swa") != nullptr &&
        number("rope.freq_base_swa") != number("rope.freq_base")) {
      fail(key_of("rope.freq_base_swa") + " is not " + key_of("rope.freq_base") +
           ": transformers' gpt_oss has one base for all layers");
    }
    add_sliding_layers(kGptOssPeriod);
  }

  void add_sliding_layers(std::uint64_t otherwise) {
    const PairView* pattern = find("attention.sliding_window_pattern");
    const std::uint64_t period = pattern == nullptr ? otherwise : pattern->whole().value_or(0);
    if (period == 0) fail(key_of("attention.sliding_window_pattern") + ": wanted a number above 0");
    Value& types = config_.set("layer_types", Value::array());
    for (std::uint64_t layer = 1; layer <= layers_; ++layer) {
      types.append(Value::string(layer % period == 0 ? "full_attention" : "sliding_attention"));
    }
    config_.set("sliding_window", whole(count("attention.sliding_window")));
  }

  void add_gemma() {
    add_sliding_layers(kGemmaPeriod);
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

  DType dtype_;
  std::string_view name_;
  const Family* family_ = nullptr;
  std::uint64_t hidden_ = 0, layers_ = 0, heads_ = 0, kv_heads_ = 0, head_dim_ = 0;
  std::uint64_t vocabulary_ = 0, intermediate_ = 0, experts_ = 0, expert_intermediate_ = 0;
  Value config_;
};

}  // namespace

Value import_config(const FileReader& file, DType dtype) { return Importer(file, dtype).make(); }

}  // namespace monograph::gguf
