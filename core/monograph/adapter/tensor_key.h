// The name of a tensor in adapter_model.safetensors, taken apart. Lenient: names that PEFT would
// not write are understood too, so that a check can say what is wrong with them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace monograph {

// What PEFT writes before every name.
inline constexpr std::string_view kAdapterPrefix = "base_model.model.";

enum class TensorRole : std::uint8_t {
  kA,           // MODULE.lora_A.weight, MODULE.lora_embedding_A
  kB,           // MODULE.lora_B.weight, MODULE.lora_embedding_B
  kMagnitude,   // MODULE.lora_magnitude_vector, of DoRA
  kFactorBias,  // MODULE.lora_B.bias, of lora_bias
  kTokens,      // MODULE.token_adapter.trainable_tokens_delta
  kBaseLayer,   // MODULE.base_layer.weight: PEFT saves it beside the LoRA of an embedding or a head
  kReplaced,    // a whole parameter: modules_to_save, biases
  kUnknown,     // has "lora_" in its name and is none of the above
};

struct TensorKey {
  TensorRole role = TensorRole::kUnknown;
  std::string module;        // without "base_model.model."; of kReplaced the whole parameter
  std::string adapter_name;  // "default" of "X.lora_A.default.weight"; PEFT leaves it out
  std::size_t prefixes = 0;  // how often "base_model.model." stands before it; PEFT: once
  bool embedding = false;    // lora_embedding_A or lora_embedding_B
};

TensorKey parse_tensor_key(std::string_view name);

}  // namespace monograph
