// Settings of a config.json by name, each checked where it is read.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "monograph/base/error.h"
#include "monograph/text/json_document.h"
#include "monograph/text/utf8.h"
#include "monograph/weights/model_settings.h"

namespace monograph::gguf {

class ConfigSettings {
 public:
  ConfigSettings(const json::Value& config, std::string_view source)
      : config_(config), source_(source) {}

  const json::Value* find(std::string_view key) const { return find_setting(config_, key); }

  std::uint64_t count(std::string_view key, std::uint64_t otherwise = 0) const {
    const json::Value* value = find(key);
    if (value == nullptr && otherwise != 0) return otherwise;
    const std::uint64_t number = value == nullptr ? 0 : value->as_unsigned().value_or(0);
    if (number == 0 || number > std::numeric_limits<std::uint32_t>::max()) {
      fail(std::string(key) + " is " + shown(value) + ", wanted a number from 1 to 2^32 - 1");
    }
    return number;
  }

  double number(std::string_view key, double otherwise) const {
    const json::Value* value = find(key);
    return value == nullptr ? otherwise : positive(key, value);
  }

  double positive(std::string_view key, const json::Value* value) const {
    const double number = value == nullptr ? 0 : value->as_double().value_or(0);
    if (!(number > 0) || number > std::numeric_limits<float>::max()) {
      fail(std::string(key) + " is " + shown(value) + ", wanted a positive number");
    }
    return number;
  }

  bool flag(std::string_view key, bool otherwise) const {
    const json::Value* value = find(key);
    return value == nullptr ? otherwise : value->as_bool().value_or(otherwise);
  }

  std::string_view text(std::string_view key, std::string_view otherwise = {}) const {
    const json::Value* value = find(key);
    return value == nullptr ? otherwise : value->as_string().value_or("");
  }

  // Throws unless the setting is absent, false, 0 or 1 as `off` says.
  void must_be_off(std::string_view key) const {
    const json::Value* value = find(key);
    if (value != nullptr && value->as_bool().value_or(true)) {
      fail(std::string(key) + " is " + shown(value) + ": llama.cpp has nothing for it here");
    }
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(std::string(source_) + ": " + what);
  }

  static std::string shown(const json::Value* value) {
    return value == nullptr ? "missing" : text::in_quotes(json::dump_line(*value));
  }

 private:
  const json::Value& config_;
  std::string_view source_;
};

}  // namespace monograph::gguf
