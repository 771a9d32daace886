// adapter_config.json of PEFT: every field is understood, known to change nothing about a merge, or
// refused when it is set. Knows text, not files.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/adapter/module_pattern.h"

namespace monograph {

inline constexpr std::uint64_t kMaxAdapterConfigBytes = 1'000'000;
inline constexpr std::uint64_t kMaxLoraRank = 65'536;

// How a field of PEFT's LoraConfig is treated.
enum class FieldUse : std::uint8_t {
  kUnderstood,
  kHarmless,   // any value; says nothing about the merged weights
  kMustBeOff,  // null, false, {} or []; `reason` says what it would change
};

struct AdapterField {
  std::string_view name;
  FieldUse use;
  std::string_view reason;
};

// Every field of LoraConfig of PEFT 0.21, sorted by name.
std::span<const AdapterField> adapter_fields();

struct RankRule {
  std::string text;
  ModulePattern pattern;
  double value;
};

struct TrainableTokens {
  std::string module;  // the end of a module's name; empty for the input embedding
  std::vector<std::uint64_t> tokens;
};

struct AdapterConfig {
  std::uint64_t rank = 8;
  double alpha = 8;
  std::vector<RankRule> rank_pattern,
      alpha_pattern;  // in the order of the file; the first one wins
  bool use_rslora = false;
  bool use_dora = false;
  bool lora_bias = false;
  bool fan_in_fan_out = false;
  bool ensure_weight_tying = false;
  std::vector<std::string> modules_to_save;
  std::vector<TrainableTokens> trainable_tokens;
  std::string base_model_name_or_path;
  // Parameters that have a LoRA of their own, by the end of their names: "experts.gate_up_proj".
  std::vector<std::string> target_parameters;
  std::string peft_version;  // of the library that wrote the file; empty if it does not say

  // PEFT 0.20 and newer has inputs and outputs of every parameter where the model has them.
  bool keeps_order_of_parameters() const;

  // Whether target_parameters names the parameter "model.layers.0.mlp.experts.gate_up_proj".
  bool targets(std::string_view parameter) const;

  std::uint64_t rank_of(std::string_view module) const;
  // What B * A is multiplied with: alpha / rank, or alpha / sqrt(rank) with use_rslora.
  double scale_of(std::string_view module) const;
};

// Throws Error unless `json` is an object without duplicate keys that follows the rules above. A
// field that LoraConfig of PEFT 0.21 does not have must be null: what it means is not known.
AdapterConfig parse_adapter_config(std::string_view json, std::string_view source);

}  // namespace monograph
