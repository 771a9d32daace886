#include "monograph/train/recipe_value.h"

#include <charconv>
#include <string_view>

namespace monograph::train {

using Kind = RecipeValue::Kind;

bool RecipeValue::asks_for_nothing() const {
  switch (kind) {
    case Kind::kNull:
      return true;
    case Kind::kBool:
      return !truth;
    case Kind::kWhole:
    case Kind::kNumber:
      return number == 0;
    case Kind::kText:
      return text.empty();
    case Kind::kList:
      return items.empty();
    case Kind::kMapping:
      return members.empty();
  }
  return false;
}

RecipeValue text_value(std::string text) {
  RecipeValue value;
  value.kind = Kind::kText;
  value.text = std::move(text);
  return value;
}

std::string shown(const RecipeValue& value) {
  std::string all;
  const auto add = [&](const std::string& part) { all += (all.empty() ? "" : ", ") + part; };
  switch (value.kind) {
    case Kind::kNull:
      return "empty";
    case Kind::kList:
      for (const RecipeValue& item : value.items) add(shown(item));
      return "[" + all + "]";
    case Kind::kMapping:
      for (const RecipeEntry& entry : value.members) add(entry.key + ": " + shown(entry.value));
      return "{" + all + "}";
    default:
      return value.text.empty() ? "''" : value.text;
  }
}

json::Value as_json(const RecipeValue& value) {
  json::Value made;
  switch (value.kind) {
    case Kind::kNull:
      break;
    case Kind::kBool:
      return json::Value::boolean(value.truth);
    case Kind::kWhole:
      return json::Value::number(value.whole);
    case Kind::kNumber:
      return json::Value::number(value.number);
    case Kind::kText:
      return json::Value::string(value.text);
    case Kind::kList:
      made = json::Value::array();
      for (const RecipeValue& item : value.items) made.append(as_json(item));
      break;
    case Kind::kMapping:
      made = json::Value::object();
      for (const RecipeEntry& entry : value.members)
        made.append_member(entry.key, as_json(entry.value));
      break;
  }
  return made;
}

std::optional<double> number_in(const std::string& text) {
  const bool sign = text.starts_with('+') || text.starts_with('-');
  const std::string_view digits = std::string_view(text).substr(sign ? 1 : 0);
  if (digits.empty() || std::string_view("0123456789.").find(digits[0]) == std::string_view::npos)
    return std::nullopt;
  double number = 0;
  const auto [end, wrong] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (wrong != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  return text[0] == '-' ? -number : number;
}

}  // namespace monograph::train
