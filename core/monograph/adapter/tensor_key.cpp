#include "monograph/adapter/tensor_key.h"

#include <array>

namespace monograph {
namespace {

struct Factor {
  std::string_view part;
  TensorRole role;
  bool embedding, weight;  // weight: ".weight" follows
};
constexpr std::array kFactors = {
    Factor{".lora_A", TensorRole::kA, false, true},
    Factor{".lora_B", TensorRole::kB, false, true},
    Factor{".lora_embedding_A", TensorRole::kA, true, false},
    Factor{".lora_embedding_B", TensorRole::kB, true, false},
    Factor{".lora_magnitude_vector", TensorRole::kMagnitude, false, false},
};

bool remove_suffix(std::string_view& text, std::string_view suffix) {
  if (!text.ends_with(suffix)) return false;
  text.remove_suffix(suffix.size());
  return true;
}

// What follows the factor's part of the name: nothing, or ".NAME".
bool take_adapter_name(std::string_view rest, TensorKey& key) {
  if (rest.empty()) return true;
  if (rest.size() < 2 || rest[0] != '.') return false;
  key.adapter_name = rest.substr(1);
  return true;
}

bool read_factor(std::string_view name, const Factor& factor, TensorKey& key) {
  const std::size_t at = name.rfind(factor.part);
  if (at == std::string_view::npos) return false;
  std::string_view rest = name.substr(at + factor.part.size());
  if (!rest.empty() && rest[0] != '.') return false;
  key.module = name.substr(0, at);
  key.role = factor.role;
  key.embedding = factor.embedding;
  const bool has_weight = remove_suffix(rest, ".weight");
  if (factor.weight && !has_weight) {
    const bool bias = factor.role == TensorRole::kB && remove_suffix(rest, ".bias");
    key.role = bias ? TensorRole::kFactorBias : TensorRole::kUnknown;
  } else if (!factor.weight && has_weight) {
    key.role = TensorRole::kUnknown;
  }
  if (!take_adapter_name(rest, key)) key.role = TensorRole::kUnknown;
  return true;
}

}  // namespace

TensorKey parse_tensor_key(std::string_view name) {
  TensorKey key;
  for (; name.starts_with(kAdapterPrefix); ++key.prefixes) {
    name.remove_prefix(kAdapterPrefix.size());
  }
  for (const Factor& factor : kFactors) {
    if (read_factor(name, factor, key)) return key;
  }
  key.module = name;
  std::string_view module = name;
  if (remove_suffix(module, ".token_adapter.trainable_tokens_delta")) {
    key.role = TensorRole::kTokens;
    key.module = module;
  } else if (remove_suffix(module, ".base_layer.weight")) {
    key.role = TensorRole::kBaseLayer;
    key.module = module;
  } else {
    const bool known = name.find("lora_") == std::string_view::npos &&
                       name.find("token_adapter.") == std::string_view::npos;
    key.role = known ? TensorRole::kReplaced : TensorRole::kUnknown;
  }
  return key;
}

}  // namespace monograph
