#include "monograph/gguf/mixture.h"

#include <charconv>

namespace monograph::gguf {
namespace {

constexpr std::uint64_t kLayersOf70b = 80;
// Of Mixtral: what all experts share is small beside them.
constexpr std::uint64_t kFewExperts = 8;

std::uint64_t layer_of(std::string_view name) {
  std::uint64_t layer = 0;
  constexpr std::string_view kBlock = "blk.";
  std::from_chars(name.data() + kBlock.size(), name.data() + name.size(), layer);
  return layer;
}

bool has_more_bits(std::uint64_t layer, std::uint64_t layers) {
  const std::uint64_t eighth = layers / 8;
  return layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2;
}

TensorType wanted_type(const ModelConfig& config, TensorType type, std::string_view name) {
  if (name == "output.weight" || (config.tied && name == "token_embd.weight")) {
    return TensorType::kQ6K;
  }
  const bool values = name.ends_with(".attn_v.weight");
  if (config.experts == kFewExperts) {
    if (values || name.ends_with(".attn_k.weight")) return TensorType::kQ8;
    if (name.ends_with(".attn_output.weight") && type == TensorType::kQ4K) return TensorType::kQ5K;
  }
  if (name.ends_with(".attn_qkv.weight")) {
    return type == TensorType::kQ4K   ? TensorType::kQ5K
           : type == TensorType::kQ5K ? TensorType::kQ6K
                                      : type;
  }
  const bool down = name.ends_with(".ffn_down.weight") || name.ends_with(".ffn_down_exps.weight");
  if (!values && !down) return type;
  if (has_more_bits(layer_of(name), config.layers)) return TensorType::kQ6K;
  const bool shared = config.layers == kLayersOf70b && config.kv_heads < config.heads;
  return values && shared && type == TensorType::kQ4K ? TensorType::kQ5K : type;
}

}  // namespace

TensorType mixed_type(const ModelConfig& config, TensorType type, std::string_view name,
                      std::uint64_t cols) {
  if (is_router(name)) return TensorType::kF32;
  const TensorType wanted = wanted_type(config, type, name);
  if (cols % info_of(wanted).block_elements == 0) return wanted;
  if (cols % 32 != 0) return TensorType::kF16;
  return wanted == TensorType::kQ4K   ? TensorType::kQ5
         : wanted == TensorType::kQ5K ? TensorType::kQ5Min
                                      : TensorType::kQ8;
}

}  // namespace monograph::gguf
