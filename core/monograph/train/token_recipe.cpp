#include "monograph/train/token_recipe.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <optional>

#include "monograph/base/error.h"
#include "monograph/files/mapped_file.h"
#include "monograph/hash/sha256.h"
#include "monograph/text/utf8.h"

namespace monograph::train {
namespace {

namespace fs = std::filesystem;
using json::Value;
using Kind = RecipeValue::Kind;

struct TokenKey {
  const char* name;
  Kind kind;
  const char* wanted;
};
constexpr TokenKey kKeys[] = {
    {"chat_template", Kind::kText, "text"},
    {"chat_template_jinja", Kind::kText, "a template or its file"},
    {"chat_template_kwargs", Kind::kMapping, "a mapping"},
    {"datasets", Kind::kList, "a list of mappings"},
    {"default_system_message", Kind::kText, "text"},
    {"eot_tokens", Kind::kList, "a list of tokens"},
    {"excess_length_strategy", Kind::kText, "drop, truncate, split or raise"},
    {"min_sample_len", Kind::kWhole, "a whole number"},
    {"sequence_len", Kind::kWhole, "a whole number"},
    {"special_tokens", Kind::kMapping, "a mapping"},
    {"tokenizer_config", Kind::kText, "a folder"},
    {"tokens", Kind::kList, "a list of tokens"},
    {"train_on_inputs", Kind::kBool, "true or false"},
};
constexpr std::array<const char*, 4> kTokenizerFiles = {
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"};

const TokenKey* find(const std::string& key) {
  const auto found = std::find_if(std::begin(kKeys), std::end(kKeys),
                                  [&](const TokenKey& k) { return key == k.name; });
  return found == std::end(kKeys) ? nullptr : found;
}

// Line ends as Python's text files have them.
std::string template_of(const std::string& written) {
  std::error_code ignored;
  if (!fs::is_regular_file(written, ignored)) {
    if (written.find('{') != std::string::npos) return written;
    throw Error("chat_template_jinja is " + written +
                ": there is no such file, and it is no template");
  }
  const files::MappedFile file(written);
  std::string text;
  for (const char c : file.text()) {
    if (c == '\n' && text.ends_with('\r')) text.pop_back();
    if (text.ends_with('\r')) text.back() = '\n';
    text += c;
  }
  if (text.ends_with('\r')) text.back() = '\n';
  return text;
}

// An entry of `datasets` without what stands at its default.
Value dataset(const RecipeValue& entry) {
  if (!entry.is(Kind::kMapping)) throw Error("datasets has " + shown(entry) + ", wanted a mapping");
  Value made = Value::object();
  for (const RecipeEntry& member : entry.members) {
    const RecipeValue& value = member.value;
    const bool can_be_left_out =
        value.is(Kind::kNull) || value.is(Kind::kBool) || value.is(Kind::kMapping);
    if (!can_be_left_out || !value.asks_for_nothing())
      made.append_member(member.key, as_json(value));
  }
  return made;
}

Value without_nulls(const RecipeValue& mapping) {
  Value made = Value::object();
  for (const RecipeEntry& member : mapping.members)
    if (!member.value.is(Kind::kNull)) made.append_member(member.key, as_json(member.value));
  return made;
}

struct Difference {
  std::string key;
  const Value* there;
  const Value* here;
};

std::optional<Difference> difference(const std::string& key, const Value* there,
                                     const Value* here) {
  if (there == nullptr && here == nullptr) return std::nullopt;
  if (there == nullptr || here == nullptr || there->kind() != here->kind())
    return Difference{key, there, here};
  switch (there->kind()) {
    case json::Kind::kNull:
      return std::nullopt;
    case json::Kind::kBool:
      if (there->as_bool() == here->as_bool()) return std::nullopt;
      break;
    case json::Kind::kNumber:
      if (there->as_double() == here->as_double()) return std::nullopt;
      break;
    case json::Kind::kString:
      if (there->text() == here->text()) return std::nullopt;
      break;
    case json::Kind::kArray: {
      const auto& a = there->items();
      const auto& b = here->items();
      for (std::size_t i = 0; i < std::max(a.size(), b.size()); ++i)
        if (auto found = difference(key + "." + std::to_string(i), i < a.size() ? &a[i] : nullptr,
                                    i < b.size() ? &b[i] : nullptr))
          return found;
      return std::nullopt;
    }
    case json::Kind::kObject: {
      for (const json::Member& member : there->members())
        if (auto found = difference(key + "." + member.key, &member.value, here->find(member.key)))
          return found;
      for (const json::Member& member : here->members())
        if (there->find(member.key) == nullptr)
          return Difference{key + "." + member.key, nullptr, &member.value};
      return std::nullopt;
    }
  }
  return Difference{key, there, here};
}

std::string brief(const Value* value) {
  if (value == nullptr) return "missing";
  const std::string all = value->is(json::Kind::kString) ? value->text() : json::dump_line(*value);
  return text::in_quotes(all);
}

void check_tokenizer(const TokenFile& tokens, const fs::path& folder) {
  if (!fs::is_regular_file(folder / kTokenizerFiles[0])) return;
  for (const char* const name : kTokenizerFiles) {
    const Value* const recorded = tokens.tokenizer().find(name);
    const std::string there = recorded == nullptr ? "missing" : recorded->text();
    std::string here = "missing";
    if (fs::is_regular_file(folder / name)) {
      Sha256 hash;
      hash.add(files::MappedFile(folder / name).bytes());
      here = hash.hex();
    }
    if (there != here)
      throw Error(tokens.name() + ": made with a tokenizer whose " + name + " has the hash " +
                  there.substr(0, 12) + ", that of " + folder.string() + " has " +
                  here.substr(0, 12) + "; make the tokens anew with monograph preprocess");
  }
}

}  // namespace

bool is_of_tokens(const std::string& key) { return find(key) != nullptr; }

void add_to_said(Value& said, const RecipeEntry& entry) {
  const TokenKey& key = *find(entry.key);
  const RecipeValue& value = entry.value;
  if (value.is(Kind::kNull)) return;
  if (!value.is(key.kind))
    throw Error(entry.key + " is " + shown(value) + ", wanted " + key.wanted);
  if (entry.key != "sequence_len" && value.asks_for_nothing()) return;
  Value made = as_json(value);
  if (entry.key == "chat_template_jinja") made = Value::string(template_of(value.text));
  if (entry.key == "tokenizer_config" && value.text[0] == '~')
    throw Error("tokenizer_config is " + value.text + ", wanted the folder written out");
  if (value.is(Kind::kMapping)) made = without_nulls(value);
  if (entry.key == "datasets") {
    made = Value::array();
    for (const RecipeValue& item : value.items) made.append(dataset(item));
  }
  said.set(entry.key, std::move(made));
}

void check_same_tokens(const TokenFile& tokens, const Value& said, const std::string& base_model) {
  const Value& recipe = tokens.recipe();
  std::vector<std::string> keys;
  for (const Value* const side : {&recipe, &said})
    for (const json::Member& member : side->members()) keys.push_back(member.key);
  for (const std::string& key : keys)
    if (const auto found = difference(key, recipe.find(key), said.find(key)))
      throw Error(tokens.name() + ": made with another recipe: " + found->key + " is " +
                  brief(found->there) + " there and " + brief(found->here) +
                  " here; make the tokens anew with monograph preprocess, or write what they were "
                  "made with");
  if (said.find("tokenizer_config") == nullptr) check_tokenizer(tokens, base_model);
}

}  // namespace monograph::train
