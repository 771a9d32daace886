// Which projections have LoRA, by PEFT's rules: all; those whose name ends with one of a list; or
// those that a regular expression matches whole.
#pragma once

#include <regex>
#include <string>
#include <string_view>
#include <vector>

namespace monograph::train {

struct TargetModules {
  bool all = false;
  std::vector<std::string> names;  // besides all
  std::string pattern;

  bool takes_all() const { return all || (names.empty() && pattern.empty()); }
};

bool ends_with_name(std::string_view module, std::string_view name);

// An expression of the part that Python's re and ECMAScript read alike. Throws Error for any other.
std::regex compile_pattern(const std::string& text);

// Throws Error if the pattern takes a module of a model with so many layers that is no projection:
// PEFT would adapt that, too.
void check_takes_projections_alone(const TargetModules& targets, std::size_t layers);

}  // namespace monograph::train
