// read_recipe FILE: documents of YAML, each behind a NUL, as this library reads them: a line of
// JSON each, {"error": ...} or {"value": ...}, where scalars are [kind, text]. For
// tests/python/native/test_recipe_reader.py.
#include <cstdio>
#include <string>

#include "monograph/base/error.h"
#include "monograph/files/mapped_file.h"
#include "monograph/train/recipe_text.h"

namespace {

using monograph::json::Value;
using monograph::train::RecipeEntry;
using monograph::train::RecipeValue;
using Kind = RecipeValue::Kind;

Value mapping(const std::vector<RecipeEntry>& entries);

Value tagged(const RecipeValue& value) {
  if (value.is(Kind::kMapping)) return mapping(value.members);
  Value made = Value::array();
  if (value.is(Kind::kList)) {
    made.append(Value::string("list"));
    for (const RecipeValue& item : value.items) made.append(tagged(item));
    return made;
  }
  const char* const names[] = {"null", "bool", "int", "float", "str"};
  made.append(Value::string(names[static_cast<int>(value.kind)]));
  made.append(value.is(Kind::kText) ? Value::string(value.text) : as_json(value));
  return made;
}

Value mapping(const std::vector<RecipeEntry>& entries) {
  Value made = Value::object();
  for (const RecipeEntry& entry : entries) made.append_member(entry.key, tagged(entry.value));
  return made;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) return 2;
  const monograph::files::MappedFile file(arguments[1]);
  std::string_view rest = file.text();
  while (!rest.empty()) {
    const std::size_t end = rest.find('\0');
    Value line = Value::object();
    try {
      line.set("value", mapping(monograph::train::parse_recipe(rest.substr(0, end), "r.yml")));
    } catch (const monograph::Error& error) {
      line.set("error", Value::string(error.what()));
    }
    std::puts(monograph::json::dump_line(line).c_str());
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
  }
}
