// The keys of one object of config.json, each asked for by name: `finish` refuses what nobody asked
// for. Every Error names the key, the value found and the value wanted.
#pragma once

#include <cstddef>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include "monograph/text/json_document.h"

namespace monograph::train {

class ConfigKeys {
 public:
  // Throws Error if it is no object.
  ConfigKeys(const json::Value& object, std::string_view source);

  // nullptr if it is absent or null.
  const json::Value* find(std::string_view key);
  bool has(std::string_view key) const { return object_.find(key) != nullptr; }

  std::size_t count(std::string_view key, std::optional<std::size_t> otherwise = {});
  double number(std::string_view key, std::optional<double> otherwise = {});
  // Above 0.
  double positive(std::string_view key, std::optional<double> otherwise = {});
  bool flag(std::string_view key, bool otherwise);
  // Absent, null, or this.
  void must_be(std::string_view key, std::string_view wanted);

  void finish(std::span<const char* const> harmless) const;

  [[noreturn]] void fail(std::string_view key, const json::Value* value,
                         const std::string& wanted) const;
  static std::string shown(const json::Value& value);

 private:
  const json::Value& object_;
  std::string source_;
  std::set<std::string> asked_;
};

}  // namespace monograph::train
