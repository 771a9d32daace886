// What llama.cpp needs to know of config.json, checked: a setting that its graph of the
// architecture does not have is refused by name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/gguf/file_writer.h"
#include "monograph/gguf/names.h"
#include "monograph/text/json_document.h"

namespace monograph::gguf {

// llama.cpp's: every sixth layer of Gemma 3 sees everything; the others have this base.
inline constexpr std::uint64_t kGemmaPeriod = 6;
inline constexpr double kGemmaLocalTheta = 10000;
// It scales the attention of a model with this many layers by the width of all heads.
inline constexpr std::uint64_t kGemma27BLayers = 62;

enum class RopeScaling : std::uint8_t { kNone, kLinear, kYarn, kLlama3, kLongrope };

struct Rope {
  double theta = 10000;
  std::uint64_t dimensions = 0;  // of a head that are turned
  RopeScaling scaling = RopeScaling::kNone;
  double factor = 1;
  std::uint64_t original_context = 0;                // kYarn, kLlama3, kLongrope; every Phi 3
  double low_freq_factor = 0, high_freq_factor = 0;  // kLlama3
  // kLongrope: what each frequency is divided by, and what sines and cosines are multiplied with.
  std::vector<float> long_factors, short_factors;
  double attention_factor = 1;
};

struct ModelConfig {
  const Architecture* architecture = nullptr;
  std::uint64_t layers = 0, hidden = 0, intermediate = 0;
  std::uint64_t heads = 0, kv_heads = 0, head_dim = 0;
  std::uint64_t vocabulary = 0, context = 0;
  double norm_epsilon = 0;
  Rope rope;
  std::uint64_t sliding_window = 0;  // Gemma 3, gpt-oss; Phi 3, where 0 is none
  // Of a mixture; 0 experts: one MLP a layer, of `intermediate`.
  std::uint64_t experts = 0, experts_used = 0, expert_intermediate = 0;
  bool tied = false;               // head and embedding are one tensor
  std::vector<std::string> notes;  // what llama.cpp does otherwise

  bool is_gemma() const { return architecture->name == "gemma3"; }
  bool is_phi() const { return architecture->name == "phi3"; }
  bool is_gpt_oss() const { return architecture->name == "gpt-oss"; }
  bool has_head_norms() const { return is_gemma() || architecture->name.starts_with("qwen3"); }
};

// `source` begins every message. Throws Error.
ModelConfig read_model_config(const json::Value& config, std::string_view source);

// The keys of the architecture, "llama.context_length" and so on.
void add_architecture(Metadata& metadata, const ModelConfig& config);

// What each frequency is divided by under kLlama3, in the order of the frequencies: the tensor
// "rope_freqs.weight". Empty under any other scaling; kLongrope's are in Rope.
std::vector<float> rope_factors(const ModelConfig& config);

}  // namespace monograph::gguf
