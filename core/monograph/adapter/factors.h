// The low-rank factors of an adapter, each pair at its place in the base. Lenient where Adapter is
// strict: what is wrong is listed, tensor by tensor, and the rest is still placed.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/adapter/base_modules.h"
#include "monograph/adapter/config.h"
#include "monograph/adapter/tensor_key.h"
#include "monograph/safetensors/checkpoint.h"

namespace monograph {

// Something that keeps an adapter from being applied as it was trained.
struct ServingFinding {
  std::string_view rule;  // "pair", "shape", "scale" ...: the table of docs/explain/serving.md
  std::string key;        // of a tensor, or of adapter_config.json
  std::string what;
  bool convertible = false;  // a ServingForm is without it
};

struct KeyedTensor {
  safetensors::LocatedTensor tensor;
  TensorKey key;

  const std::string& name() const { return tensor.entry->name; }
};

struct Factors {
  std::string module;  // as TensorKey::module
  const KeyedTensor *a = nullptr, *b = nullptr;
  bool embedding = false;
};

struct AdapterTensors {
  std::vector<KeyedTensor> all;            // sorted by name
  std::map<std::string, Factors> factors;  // by module
  std::vector<ServingFinding> problems;    // two tensors for one role
};

// The checkpoint must outlive the result, which points into itself: do not copy it.
AdapterTensors collect_tensors(const safetensors::Checkpoint& checkpoint);

// A pair of factors and the matrix it changes.
struct PlacedFactors {
  const Factors* factors = nullptr;
  std::string name;   // what rank_pattern and alpha_pattern are matched with
  BaseMatrix matrix;  // of a stack: shape is that of one expert
  std::uint64_t rank = 0;
  // Of a parameter of experts (target_parameters): how many, and which parameter of which module.
  std::uint64_t experts = 0;
  std::string module, parameter;
  bool swapped = false;  // of experts: A is that of the outputs, as PEFT before 0.20 has it

  std::uint64_t outputs() const { return matrix.shape[0]; }
  std::uint64_t inputs() const { return matrix.shape[1]; }
  // A of one expert, [rank, inputs], and B, [outputs, rank], in fp32 without rounding. Of an
  // embedding A is [rank, tokens] and B [width, rank], as PEFT stores them.
  std::vector<float> right(std::uint64_t expert = 0) const;
  std::vector<float> left(std::uint64_t expert = 0) const;
};

struct Placement {
  std::vector<PlacedFactors> placed;  // by module
  std::vector<ServingFinding> problems;
};

// `config` is null where adapter_config.json could not be understood.
Placement place_factors(const AdapterTensors& tensors, const BaseModules& base,
                        const AdapterConfig* config);

// The elements of a tensor of fp32, bf16 or fp16.
std::vector<float> read_floats(const safetensors::LocatedTensor& tensor);

// "[64, 8]".
std::string shape_in_brackets(const std::vector<std::uint64_t>& shape);

}  // namespace monograph
