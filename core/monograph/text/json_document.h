// A JSON document that keeps what it does not understand: members in their order, numbers as they
// were written. For config.json, adapter_config.json and quant_state, which come from outside:
// depth and size are bounded and duplicate keys are errors.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace monograph::json {

class Value;
struct Member;

enum class Kind : std::uint8_t { kNull, kBool, kNumber, kString, kArray, kObject };

class Value {
 public:
  Value() = default;  // null
  static Value boolean(bool value);
  static Value number(std::int64_t value);
  // The shortest text that reads back the same; null for NaN and infinities, which JSON has not.
  static Value number(double value);
  static Value string(std::string_view text);
  static Value array();
  static Value object();

  Kind kind() const { return kind_; }
  bool is(Kind kind) const { return kind_ == kind; }

  // The text of a string, decoded, or of a number, as written.
  const std::string& text() const { return text_; }
  std::optional<bool> as_bool() const;
  std::optional<std::uint64_t> as_unsigned() const;  // digits only, below 2^64
  std::optional<double> as_double() const;           // any number; nullopt beyond a double
  std::optional<std::string_view> as_string() const;

  const std::vector<Value>& items() const { return items_; }       // of an array
  const std::vector<Member>& members() const { return members_; }  // of an object, in order
  const Value* find(std::string_view key) const;                   // nullptr if there is none

  // Replaces or appends a member; makes a null an object.
  Value& set(std::string_view key, Value value);
  // Appends a member that is known to be new: `set` looks at all others first.
  Value& append_member(std::string_view key, Value value);
  void erase(std::string_view key);
  Value& append(Value value);

 private:
  friend class Parser;
  Kind kind_ = Kind::kNull;
  bool bool_ = false;
  std::string text_;
  std::vector<Value> items_;
  std::vector<Member> members_;
};

struct Member {
  std::string key;
  Value value;
};

inline constexpr int kMaxDepth = 64;
struct Limits {
  std::size_t bytes = 16'000'000;
  // A value takes 88 bytes in memory and two in the text: this bounds a document to 50 MB.
  std::size_t values = 250'000;
};

// Throws Error, with `source` in its message, unless `text` is one JSON value: RFC 8259, UTF-8, no
// duplicate keys, at most kMaxDepth containers inside one another, within the two limits above.
// NaN, Infinity and -Infinity are accepted as numbers, because Python writes them.
Value parse(std::string_view text, std::string_view source, const Limits& limits = {});

// Two blanks per level, as Python's json.dumps(indent=2), and a line feed at the end.
std::string dump(const Value& value);
// One line with ", " and ": ", as Python's json.dumps.
std::string dump_line(const Value& value);
// `text` as a JSON string, in quotes.
std::string quote(std::string_view text);

}  // namespace monograph::json
