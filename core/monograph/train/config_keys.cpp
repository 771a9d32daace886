#include "monograph/train/config_keys.h"

#include <algorithm>
#include <cmath>

#include "monograph/base/error.h"
#include "monograph/text/utf8.h"

namespace monograph::train {

ConfigKeys::ConfigKeys(const json::Value& object, std::string_view source)
    : object_(object), source_(source) {
  if (!object.is(json::Kind::kObject))
    throw Error(source_ + " is " + json::dump_line(object) + ", wanted an object");
}

const json::Value* ConfigKeys::find(std::string_view key) {
  asked_.insert(std::string(key));
  const json::Value* value = object_.find(key);
  return value == nullptr || value->is(json::Kind::kNull) ? nullptr : value;
}

std::size_t ConfigKeys::count(std::string_view key, std::optional<std::size_t> otherwise) {
  const json::Value* value = find(key);
  if (value == nullptr && otherwise) return *otherwise;
  const std::optional<std::uint64_t> found = value ? value->as_unsigned() : std::nullopt;
  if (!found || *found == 0 || *found > (1u << 30))
    fail(key, value, "a whole number from 1 to 2^30");
  return static_cast<std::size_t>(*found);
}

double ConfigKeys::number(std::string_view key, std::optional<double> otherwise) {
  const json::Value* value = find(key);
  if (value == nullptr && otherwise) return *otherwise;
  const std::optional<double> found = value ? value->as_double() : std::nullopt;
  if (!found || !std::isfinite(*found) || *found < 0) fail(key, value, "a number, 0 or more");
  return *found;
}

double ConfigKeys::positive(std::string_view key, std::optional<double> otherwise) {
  const double found = number(key, otherwise);
  if (found == 0) fail(key, find(key), "a number above 0");
  return found;
}

bool ConfigKeys::flag(std::string_view key, bool otherwise) {
  const json::Value* value = find(key);
  if (value == nullptr) return otherwise;
  const std::optional<bool> found = value->as_bool();
  if (!found) fail(key, value, "true or false");
  return *found;
}

void ConfigKeys::must_be(std::string_view key, std::string_view wanted) {
  const json::Value* value = find(key);
  if (value != nullptr && shown(*value) != wanted) fail(key, value, std::string(wanted));
}

void ConfigKeys::finish(std::span<const char* const> harmless) const {
  for (const json::Member& member : object_.members()) {
    const bool known = asked_.contains(member.key) ||
                       std::find(harmless.begin(), harmless.end(), member.key) != harmless.end();
    if (!known)
      throw Error(source_ + ": " + member.key +
                  " is not a key that the native trainer knows, wanted those of transformers for "
                  "this model_type");
  }
}

void ConfigKeys::fail(std::string_view key, const json::Value* value,
                      const std::string& wanted) const {
  throw Error(source_ + ": " + std::string(key) + " is " +
              (value == nullptr                 ? "missing"
               : value->is(json::Kind::kString) ? text::in_quotes(value->text())
                                                : shown(*value)) +
              ", wanted " + wanted);
}

std::string ConfigKeys::shown(const json::Value& value) {
  if (value.is(json::Kind::kString)) return value.text();
  // 0 and 0.0 are one number.
  if (value.is(json::Kind::kNumber) && value.as_double() == 0.0) return "0";
  return json::dump_line(value);
}

}  // namespace monograph::train
