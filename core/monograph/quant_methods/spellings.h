// The table of spellings: how producers name and shape the tensors of a packed weight. A new one is
// a row in spellings.cpp.
#pragma once

#include <array>
#include <initializer_list>
#include <span>

#include "monograph/weights/weight.h"

namespace monograph {

// A tensor that goes with the values, by name: their name up to the suffix, and `suffix`.
struct PartName {
  std::string_view suffix;
  std::string_view role;
  bool required = false;
};

// What a row is asked about: the parts that were found, and where to complain.
class Candidate {
 public:
  Candidate(const json::Value* config, Weight& weight) : config_(config), weight_(weight) {}

  Weight& weight() const { return weight_; }
  const json::Value* config() const { return config_; }
  // The part of this role; nullptr if it was not found.
  const safetensors::LocatedTensor* part(std::string_view role) const;
  // Throws Error naming file, weight and `what`.
  [[noreturn]] void fail(const std::string& what) const;
  // Throws Error unless the part has this shape.
  void want_shape(std::string_view role, std::span<const std::uint64_t> shape) const;
  void want_dtype(std::string_view role, safetensors::StoredDType dtype) const;
  // Lets the weight be decoded as `format`, the parts of these roles its scales; after shape and
  // block are set. Throws Error if a size does not fit.
  void bind(Format format, std::initializer_list<std::string_view> scale_roles) const;

 private:
  const json::Value* config_;
  Weight& weight_;
};

struct Spelling {
  std::string_view name;     // who writes it so
  std::string_view format;   // what it holds; describe may say it more exactly
  std::string_view values;   // the suffix of the values' name
  std::string_view logical;  // replaces that suffix in the weight's name
  std::array<PartName, 6> parts;
  // Cheap look at the dtypes: whether the row means this one. Rows above have been asked before.
  bool (*matches)(const Candidate& found);
  // Fills in format, shape, block, dtype and, if it can be decoded, view. Throws Error if the parts
  // contradict each other.
  void (*describe)(const Candidate& found);
};

std::span<const Spelling> spellings();
// Every format that a weight can have, plain types last; "+dq" where scales can be quantised too.
std::vector<std::string_view> weight_formats();

// Rows that need more than a few lines.
void describe_bitsandbytes(const Candidate& found, Format format);

}  // namespace monograph
