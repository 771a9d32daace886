// What one producer of packed checkpoints does: how it names and shapes the tensors of a weight,
// what this library writes in its form, and its quantization_config. A producer is a file in
// producers/ and its name in the list of CMakeLists.txt.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/quant_methods/candidate.h"
#include "monograph/quant_methods/conversion.h"
#include "monograph/safetensors/plan.h"
#include "monograph/safetensors/writer.h"
#include "monograph/text/json_document.h"

namespace monograph {

// A tensor that goes with the values, by name: their name up to the suffix, and `suffix`.
struct PartName {
  std::string_view suffix;
  std::string_view role;
  bool required = false;
};

// Tensors that are one weight.
struct StoredForm {
  std::string_view format;   // what it holds; describe may say it more exactly
  std::string_view values;   // the suffix of the values' name
  std::string_view logical;  // replaces that suffix in the weight's name
  std::array<PartName, 6> parts;
  // Cheap look at the dtypes: whether the form is this one. Those before it have been asked.
  bool (*matches)(const Candidate& found);
  // Fills in format, shape, block, dtype and, if it can be decoded, view. Throws Error if the parts
  // contradict each other.
  void (*describe)(const Candidate& found);
};

struct PackedScales;

// What is written of a quantised weight.
struct WrittenForm {
  std::string_view name;  // as users say it: "nvfp4" is nvfp4-divide
  Format format;
  // Suffixes that take the place of ".weight"; of `tensor` empty if there is no scale of a matrix.
  std::string_view values = {}, scales = {}, tensor = {};
  safetensors::StoredDType values_type = safetensors::StoredDType::kU8;
  safetensors::StoredDType scales_type = safetensors::StoredDType::kU8;
  // kGptOss: for such stacks alone; users do not name it.
  Stack stack = Stack::kNone;
  // Set where the suffixes do not say it all: the tensors, the values first, under the weight's own
  // name unless `values` has another; and all of them but the values, from the scales of all
  // blocks.
  std::vector<safetensors::TensorSpec> (*specs)(const Conversion& conversion) = nullptr;
  void (*write)(const Conversion& conversion, const PackedScales& scales,
                safetensors::ShardedWriter& writer) = nullptr;
};

struct ConfigRequest {
  const json::Value& config;  // of the folder that was quantised
  std::span<const Conversion> conversions;
  const Conversion* first;  // that quantises; bitsandbytes is asked with nullptr too
  std::optional<DType> compute_dtype;
};

struct QuantMethod {
  std::string_view name;               // who writes it so: "bitsandbytes"
  std::span<const StoredForm> stored;  // the first that matches counts
  std::span<const WrittenForm> written = {};
  // quantization_config of config.json; of a producer that is written.
  json::Value (*config)(const ConfigRequest& request) = nullptr;
  bool mixes_formats = false;  // one config for weights of several formats
  // Endings of tensors that are no weight of their own, and what is missing where they are left.
  std::span<const std::string_view> orphans = {};
  std::string_view orphan_lacks = {};
  // Only in a folder whose config names this producer: others use these endings too.
  bool orphans_by_config = false;
};

// In the order in which they are asked: the more exact before the more general.
std::span<const QuantMethod* const> quant_methods();

// Who writes a weight of this format, and how. Throws Error if nobody does.
struct WrittenBy {
  const QuantMethod* method;
  const WrittenForm* form;
};
WrittenBy written_by(Format format, Stack stack = Stack::kNone);

// Every format that a weight can have, plain types last; "+dq" where scales can be quantised too.
std::vector<std::string_view> weight_formats();

}  // namespace monograph
