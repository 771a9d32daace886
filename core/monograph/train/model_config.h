// config.json of Llama, Mistral, Qwen2 and Qwen3 as one description. Every key is understood, known
// to change nothing about training, or refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/kernels/rotary/angles.h"
#include "monograph/text/json_document.h"

namespace monograph::train {

struct ModelConfig {
  std::string family;  // "llama", "mistral", "qwen2" or "qwen3"
  std::size_t width = 0, inner = 0, layers = 0;
  std::size_t heads = 0, kv_heads = 0, head_size = 0;
  std::size_t vocabulary = 0;
  std::size_t positions = 0;  // max_position_embeddings; 0 if it is missing
  float eps = 0;
  RopeScaling rope;
  bool tied = false;  // the head is the embedding
  bool qkv_bias = false, out_bias = false, mlp_bias = false;
  bool head_norms = false;            // of queries and keys
  std::vector<std::int64_t> windows;  // of each layer: keys that a query sees, 0 for all

  std::size_t query_width() const { return heads * head_size; }
  std::size_t key_width() const { return kv_heads * head_size; }
};

// Throws Error that names the key, the value found and the value wanted.
ModelConfig read_model_config(const json::Value& config, std::string_view source);

}  // namespace monograph::train
