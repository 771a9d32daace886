// A value of a recipe, as PyYAML's safe loader reads it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "monograph/text/json_document.h"

namespace monograph::train {

struct RecipeEntry;

struct RecipeValue {
  enum class Kind : std::uint8_t { kNull, kBool, kWhole, kNumber, kText, kList, kMapping };

  Kind kind = Kind::kNull;
  std::string text;        // of a scalar: as written, without its quotes
  bool truth = false;      // of kBool
  std::int64_t whole = 0;  // of kWhole
  double number = 0;       // of kWhole and kNumber
  std::vector<RecipeValue> items;
  std::vector<RecipeEntry> members;

  bool is(Kind wanted) const { return kind == wanted; }
  // null, false, 0, "", [] or {}.
  bool asks_for_nothing() const;
};

struct RecipeEntry {
  std::string key;
  RecipeValue value;
  std::size_t line = 0;
};

RecipeValue text_value(std::string text);
// For error messages, in one line.
std::string shown(const RecipeValue& value);
json::Value as_json(const RecipeValue& value);
// What Python's float() makes of a text such as 2e-4, which YAML 1.1 has as text; nothing for
// inf, nan, and numbers beyond a double.
std::optional<double> number_in(const std::string& text);

}  // namespace monograph::train
