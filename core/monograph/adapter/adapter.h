// A PEFT adapter folder: adapter_config.json and adapter_model.safetensors, every tensor assigned
// to what it does to the base.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/adapter/config.h"
#include "monograph/adapter/recorded_base.h"
#include "monograph/safetensors/checkpoint.h"

namespace monograph {

// adapter_model.safetensors of a folder. Throws Error if it has a pickle only.
safetensors::Checkpoint open_adapter_tensors(const std::filesystem::path& folder);

// The LoRA of one module. For a linear layer A is [rank, inputs] and B is [outputs, rank]; for an
// embedding A is [rank, tokens] and B is [width, rank]. For a parameter of E experts A is [E rank,
// inputs], those of an expert together, and B is [outputs, rank E], those of a rank together.
struct LowRank {
  const safetensors::TensorEntry* a = nullptr;
  const safetensors::TensorEntry* b = nullptr;
  const safetensors::TensorEntry* magnitude = nullptr;  // of DoRA: [outputs] or [width]
  const safetensors::TensorEntry* bias = nullptr;       // of lora_bias: [outputs]
  const std::uint8_t* a_bytes = nullptr;
  const std::uint8_t* b_bytes = nullptr;
  const std::uint8_t* magnitude_bytes = nullptr;
  const std::uint8_t* bias_bytes = nullptr;
  bool embedding = false;
  std::uint64_t rank = 0;  // as the config says for the module
  double scale = 0;

  // Whether the factors have that rank: not for a parameter of experts.
  bool has_rank() const { return a->shape[0] == rank && b->shape[1] == rank; }
};

// Rows of an embedding that were trained whole: row tokens[i] becomes row i of `rows`.
struct TokenRows {
  safetensors::LocatedTensor rows;
  std::vector<std::uint64_t> tokens;
};

class Adapter {
 public:
  // Throws Error if a tensor has no known role, a role lacks its tensor, or a shape or type does
  // not fit; IoError if a file is missing.
  static Adapter open(const std::filesystem::path& folder);

  const std::filesystem::path& folder() const { return folder_; }
  const AdapterConfig& config() const { return config_; }
  const safetensors::Checkpoint& checkpoint() const { return checkpoint_; }
  const RecordedBase& recorded_base() const { return recorded_base_; }

  // By name of the module, without "base_model.model.". PEFT wraps a module once for each of its
  // target_parameters: the LoRA of the first has the most ".base_layer" behind the name.
  const std::map<std::string, LowRank>& low_rank() const { return low_rank_; }
  // By name of the tensor it takes the place of: modules_to_save, biases, and the base layers that
  // PEFT saves next to the LoRA of an embedding.
  const std::map<std::string, safetensors::LocatedTensor>& replacements() const {
    return replacements_;
  }
  // By name of the embedding's weight.
  const std::map<std::string, TokenRows>& token_rows() const { return token_rows_; }

 private:
  void assign(const safetensors::LocatedTensor& tensor);
  void replace(const std::string& name, const safetensors::LocatedTensor& with);
  void check_low_rank(const std::string& module, LowRank& lora) const;
  void assign_tokens(const std::string& module, const safetensors::LocatedTensor& tensor);
  [[noreturn]] void fail(std::string_view tensor, const std::string& what) const;

  std::filesystem::path folder_;
  AdapterConfig config_;
  safetensors::Checkpoint checkpoint_;
  RecordedBase recorded_base_;
  std::map<std::string, LowRank> low_rank_;
  std::map<std::string, safetensors::LocatedTensor> replacements_;
  std::map<std::string, TokenRows> token_rows_;
};

}  // namespace monograph
