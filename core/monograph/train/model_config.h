// config.json of Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE and Gemma 3 (text) as one description.
// Every key is understood, known to change nothing about training, or refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/kernels/gated_activation/gated_activation.h"
#include "monograph/kernels/rms_norm/rms_norm.h"
#include "monograph/kernels/rotary/angles.h"
#include "monograph/text/json_document.h"

namespace monograph::train {

// Of the layers that have a mixture of experts in the place of an MLP.
struct ExpertsConfig {
  std::size_t count = 0, slots = 0;  // experts of a layer, and of a token; 0: there are none
  std::size_t inner = 0;
  bool normalise = false;    // the weights of a token's experts sum up to 1
  std::vector<bool> layers;  // which have them
};

struct ModelConfig {
  std::string family;  // "llama", "mistral", "qwen2", "qwen3", "qwen3_moe" or "gemma3_text"
  std::size_t width = 0, inner = 0, layers = 0;
  std::size_t heads = 0, kv_heads = 0, head_size = 0;
  std::size_t vocabulary = 0;
  std::size_t positions = 0;  // max_position_embeddings; 0 if it is missing
  float eps = 0;
  NormRounding norm_rounding = NormRounding::kBeforeGain;
  bool one_plus_gain = false;  // a norm multiplies by 1 + weight
  bool head_norms = false;     // of queries and keys
  bool branch_norms = false;   // also behind attention and MLP, before they are added
  double embedding_scale = 1;  // rounded to the type of the model
  double attention_scale = 1;
  Activation activation = Activation::kSilu;
  bool tied = false;  // the head is the embedding
  bool qkv_bias = false, out_bias = false, mlp_bias = false;
  std::vector<std::int64_t> windows;  // of each layer: keys that a query sees, 0 for all
  std::vector<RopeScaling> ropes;     // the tables of angles
  std::vector<std::size_t> rope_of;   // of each layer: its table
  ExpertsConfig experts;

  bool has_experts(std::size_t layer) const { return experts.count > 0 && experts.layers[layer]; }
  // Whether some layer has an MLP.
  bool has_mlp() const;
  std::size_t query_width() const { return heads * head_size; }
  std::size_t key_width() const { return kv_heads * head_size; }
};

// Throws Error that names the key, the value found and the value wanted.
ModelConfig read_model_config(const json::Value& config, std::string_view source);

}  // namespace monograph::train
