// The flat part of YAML that recipes are written in: `key: value` lines, where a value is a scalar
// or a list of scalars, `[a, b]` or lines `- a`. Comments and empty lines are passed over. A key
// whose value is a mapping, or a list of mappings, is kept as nested, unread; anchors, tags, block
// scalars and documents of several parts are errors with their line.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace monograph::train {

struct RecipeScalar {
  std::string text;
  bool quoted = false;

  bool is_null() const;
  std::optional<bool> as_bool() const;
  std::optional<double> as_number() const;
};

struct RecipeEntry {
  std::string key;
  std::size_t line = 0;
  std::vector<RecipeScalar> items;  // one, if it is no list
  bool list = false, nested = false;
  bool whole = false;  // its value stands in its line: no line below belongs to it
};

// Throws Error that names `source` and the line. No key stands twice.
std::vector<RecipeEntry> parse_recipe(std::string_view text, const std::string& source);

}  // namespace monograph::train
