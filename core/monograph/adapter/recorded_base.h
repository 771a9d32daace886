// The base that an adapter was trained on, as it says, and whether another one is the same.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/safetensors/checkpoint.h"
#include "monograph/weights/weight.h"

namespace monograph {

// What an adapter says about the base it was trained on: the file monograph.json of its folder,
//   {"schema_version": 1, "base": {"sha256": "0123...", "weights": "dequantized"}}
// or the same two as metadata monograph.base_sha256 and monograph.base_weights of its weights.
// and, of a base that was packed in training, "packed" inside "base":
//   {"format": "nf4", "block": 64, "double_quant": true, "rule": "default", "values_sha256": "..."}
struct RecordedPacking {
  std::string format, rule;  // empty if not recorded
  std::uint64_t block = 0;
  bool double_quant = false;
  std::optional<bool> experts;  // whether those of a mixture were packed too
  // SHA-256 of a line a packed weight, sorted by name: its name as a JSON string, a blank, the
  // SHA-256 of its packed values, a line feed. The same for the model in memory and in a folder.
  std::string values_sha256;
  // The same of the stacks of experts, named by layer and projection whatever is between in a file:
  // "model.layers.0.gate_up_proj". Empty if not recorded.
  std::string experts_sha256;
};

struct RecordedBase {
  std::string sha256;   // of checkpoint_sha256; empty if not recorded
  std::string weights;  // "original", "dequantized" or empty
  std::optional<RecordedPacking> packed;
};

// Throws Error unless `json` is a monograph.json.
RecordedBase parse_recorded_base(std::string_view json, std::string_view source);

// Of an adapter's folder and its weights. Throws Error if the two contradict each other.
RecordedBase read_recorded_base(const std::filesystem::path& folder,
                                const safetensors::Checkpoint& adapter);

// Whether a base, with `sha256` that of checkpoint_sha256, is the recorded one, or holds the packed
// values that were trained on, in other files. True if nothing is recorded.
bool is_recorded_base(const RecordedBase& recorded, const std::vector<Weight>& weights,
                      const json::Value* config, const std::string& sha256);

}  // namespace monograph
