// Tensors that may be a packed weight, and what a producer asks about them.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/weights/weight.h"

namespace monograph {

// What a form is asked about: the parts that were found, and where to complain.
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

  // Of a part: kBool if it was not found.
  safetensors::StoredDType dtype_of(std::string_view role) const;
  // Of a part that is there.
  const std::vector<std::uint64_t>& shape_of(std::string_view role) const;
  bool values_are(safetensors::StoredDType dtype) const { return dtype_of("values") == dtype; }
  bool scale_is_e8m0() const;
  // Values of three dimensions: those of all experts.
  bool is_stack() const { return shape_of("values").size() == 3; }
  // The logical shape, with as many elements, and how far a scale reaches.
  void set_shape(std::vector<std::uint64_t> shape, std::vector<std::uint64_t> block) const;

 private:
  const json::Value* config_;
  Weight& weight_;
};

}  // namespace monograph
