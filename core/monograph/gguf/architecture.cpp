// The keys of an architecture, and the tensor of its rotary embedding.
#include <cmath>
#include <numbers>

#include "monograph/gguf/model_config.h"

namespace monograph::gguf {

void add_architecture(Metadata& metadata, const ModelConfig& config) {
  const std::string name(config.architecture->name);
  const auto count = [&](const char* key, std::uint64_t value) {
    metadata.add(name + key, static_cast<std::uint32_t>(value));
  };
  const auto number = [&](const char* key, double value) {
    metadata.add(name + key, static_cast<float>(value));
  };
  count(".block_count", config.layers);
  count(".context_length", config.context);
  count(".embedding_length", config.hidden);
  count(".feed_forward_length", config.intermediate);
  if (config.experts != 0) {
    count(".expert_count", config.experts);
    count(".expert_used_count", config.experts_used);
    // llama.cpp's "llama" has experts of feed_forward_length.
    if (name != "llama") count(".expert_feed_forward_length", config.expert_intermediate);
  }
  count(".attention.head_count", config.heads);
  count(".attention.head_count_kv", config.kv_heads);
  count(".attention.key_length", config.head_dim);
  count(".attention.value_length", config.head_dim);
  number(".attention.layer_norm_rms_epsilon", config.norm_epsilon);
  if (config.is_gemma() || config.is_gpt_oss() || config.is_phi()) {
    count(".attention.sliding_window", config.sliding_window);
  }
  count(".vocab_size", config.vocabulary);
  count(".rope.dimension_count", config.rope.dimensions);
  number(".rope.freq_base", config.rope.theta);
  if (config.rope.scaling == RopeScaling::kLinear || config.rope.scaling == RopeScaling::kYarn) {
    const bool yarn = config.rope.scaling == RopeScaling::kYarn;
    metadata.add(name + ".rope.scaling.type", yarn ? "yarn" : "linear");
    number(".rope.scaling.factor", config.rope.factor);
    if (yarn) count(".rope.scaling.original_context_length", config.rope.original_context);
  }
  if (!config.is_phi()) return;
  count(".rope.scaling.original_context_length", config.rope.original_context);
  if (config.rope.scaling == RopeScaling::kLongrope) {
    number(".rope.scaling.attn_factor", config.rope.attention_factor);
  }
}

// Long waves are stretched by the whole factor, short ones not at all, those between in part.
std::vector<float> rope_factors(const ModelConfig& config) {
  const Rope& rope = config.rope;
  if (rope.scaling != RopeScaling::kLlama3) return {};
  std::vector<float> factors(config.head_dim / 2);
  for (std::size_t i = 0; i < factors.size(); ++i) {
    const double exponent = 2.0 * static_cast<double>(i) / static_cast<double>(config.head_dim);
    const double wavelength = 2 * std::numbers::pi * std::pow(rope.theta, exponent);
    const double turns = static_cast<double>(rope.original_context) / wavelength;
    double factor = 1;
    if (turns < rope.low_freq_factor) {
      factor = rope.factor;
    } else if (turns <= rope.high_freq_factor) {
      const double short_share =
          (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
      factor = 1 / ((1 - short_share) / rope.factor + short_share);
    }
    factors[i] = static_cast<float>(factor);
  }
  return factors;
}

}  // namespace monograph::gguf
