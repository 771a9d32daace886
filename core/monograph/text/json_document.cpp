#include "monograph/text/json_document.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "monograph/base/error.h"
#include "monograph/text/json_scanner.h"
#include "monograph/text/utf8.h"

namespace monograph::json {

using text::in_quotes;
using text::JsonScanner;

namespace {

template <class T>
std::string number_text(T value) {
  std::array<char, 40> text{};
  const auto [end, error] = std::to_chars(text.data(), text.data() + text.size(), value);
  return {text.data(), end};
}

void append(std::string& out, const Value& value, int indent, int depth);

void break_line(std::string& out, int indent, int depth) {
  if (indent == 0) return;
  out += '\n';
  out.append(static_cast<std::size_t>(indent) * static_cast<std::size_t>(depth), ' ');
}

// The items of a container between `open` and `close`.
template <class Items, class Body>
void append_items(std::string& out, const Items& items, char open, char close, int indent,
                  int depth, Body body) {
  out += open;
  bool first = true;
  for (const auto& item : items) {
    if (!std::exchange(first, false)) out += indent == 0 ? ", " : ",";
    break_line(out, indent, depth + 1);
    body(item);
  }
  if (!first) break_line(out, indent, depth);
  out += close;
}

void append(std::string& out, const Value& value, int indent, int depth) {
  switch (value.kind()) {
    case Kind::kNull:
      out += "null";
      break;
    case Kind::kBool:
      out += *value.as_bool() ? "true" : "false";
      break;
    case Kind::kNumber:
      out += value.text();
      break;
    case Kind::kString:
      out += quote(value.text());
      break;
    case Kind::kArray:
      append_items(out, value.items(), '[', ']', indent, depth,
                   [&](const Value& item) { append(out, item, indent, depth + 1); });
      break;
    case Kind::kObject:
      append_items(out, value.members(), '{', '}', indent, depth, [&](const Member& member) {
        out += quote(member.key) + ": ";
        append(out, member.value, indent, depth + 1);
      });
      break;
  }
}

}  // namespace

Value Value::boolean(bool value) {
  Value out;
  out.kind_ = Kind::kBool;
  out.bool_ = value;
  return out;
}

Value Value::number(std::int64_t value) {
  Value out;
  out.kind_ = Kind::kNumber;
  out.text_ = number_text(value);
  return out;
}

Value Value::number(double value) {
  Value out;
  if (!std::isfinite(value)) return out;
  out.kind_ = Kind::kNumber;
  out.text_ = number_text(value);
  // 6 would be read back as a whole number.
  if (out.text_.find_first_of(".en") == std::string::npos) out.text_ += ".0";
  return out;
}

Value Value::string(std::string_view text) {
  Value out;
  out.kind_ = Kind::kString;
  out.text_ = text;
  return out;
}

Value Value::array() {
  Value out;
  out.kind_ = Kind::kArray;
  return out;
}

Value Value::object() {
  Value out;
  out.kind_ = Kind::kObject;
  return out;
}

std::optional<bool> Value::as_bool() const {
  if (kind_ != Kind::kBool) return std::nullopt;
  return bool_;
}

std::optional<std::uint64_t> Value::as_unsigned() const {
  if (kind_ != Kind::kNumber) return std::nullopt;
  std::uint64_t value = 0;
  const char* last = text_.data() + text_.size();
  const auto [end, error] = std::from_chars(text_.data(), last, value);
  if (error != std::errc() || end != last) return std::nullopt;
  return value;
}

std::optional<double> Value::as_double() const {
  if (kind_ != Kind::kNumber) return std::nullopt;
  double value = 0;
  const char* last = text_.data() + text_.size();
  const auto [end, error] = std::from_chars(text_.data(), last, value);
  if (error != std::errc() || end != last) return std::nullopt;
  return value;
}

std::optional<std::string_view> Value::as_string() const {
  if (kind_ != Kind::kString) return std::nullopt;
  return text_;
}

const Value* Value::find(std::string_view key) const {
  const auto found = std::find_if(members_.begin(), members_.end(),
                                  [&](const Member& member) { return member.key == key; });
  return found == members_.end() ? nullptr : &found->value;
}

Value& Value::set(std::string_view key, Value value) {
  if (kind_ == Kind::kNull) kind_ = Kind::kObject;
  MONOGRAPH_ASSERT(kind_ == Kind::kObject);
  for (Member& member : members_) {
    if (member.key == key) return member.value = std::move(value);
  }
  return members_.emplace_back(Member{std::string(key), std::move(value)}).value;
}

Value& Value::append_member(std::string_view key, Value value) {
  if (kind_ == Kind::kNull) kind_ = Kind::kObject;
  MONOGRAPH_ASSERT(kind_ == Kind::kObject);
  return members_.emplace_back(Member{std::string(key), std::move(value)}).value;
}

void Value::erase(std::string_view key) {
  std::erase_if(members_, [&](const Member& member) { return member.key == key; });
}

Value& Value::append(Value value) {
  if (kind_ == Kind::kNull) kind_ = Kind::kArray;
  MONOGRAPH_ASSERT(kind_ == Kind::kArray);
  return items_.emplace_back(std::move(value));
}

class Parser {
 public:
  Parser(std::string_view text, std::string_view source, const Limits& limits)
      : scanner_(text, source), limits_(limits) {}

  Value run() {
    Value value = parse_value(kMaxDepth);
    scanner_.expect_end();
    return value;
  }

 private:
  Value parse_value(int depth) {
    if (++values_ > limits_.values) {
      scanner_.fail("more than " + std::to_string(limits_.values) + " values");
    }
    Value value;
    const char first = scanner_.peek();
    if ((first == '{' || first == '[') && depth <= 0) {
      scanner_.fail("containers are nested too deeply");
    }
    if (first == '{') {
      value.kind_ = Kind::kObject;
      scanner_.object([&](std::string_view key) {
        value.members_.push_back({std::string(key), parse_value(depth - 1)});
      });
      const auto key_at = [&](std::size_t i) { return std::string_view(value.members_[i].key); };
      if (const auto twice = text::find_duplicate(value.members_.size(), key_at)) {
        scanner_.fail("duplicate key " + in_quotes(*twice));
      }
    } else if (first == '[') {
      value.kind_ = Kind::kArray;
      scanner_.array([&] { value.items_.push_back(parse_value(depth - 1)); });
    } else if (first == '"') {
      value = Value::string(scanner_.string());
    } else if (const auto word = python_word(); !word.empty()) {
      value.kind_ = Kind::kNumber;
      value.text_ = word;
    } else if (first == 't' || first == 'f' || first == 'n') {
      scanner_.skip_value(1);
      if (first != 'n') value = Value::boolean(first == 't');
    } else {
      value.kind_ = Kind::kNumber;
      value.text_ = scanner_.number();
    }
    return value;
  }

  // Consumes it; empty if none stands here.
  std::string_view python_word() {
    for (const std::string_view word : {"NaN", "Infinity", "-Infinity"}) {
      if (scanner_.accept_word(word)) return word;
    }
    return {};
  }

  JsonScanner scanner_;
  const Limits& limits_;
  std::size_t values_ = 0;
};

Value parse(std::string_view text, std::string_view source, const Limits& limits) {
  if (text.size() > limits.bytes) {
    throw Error(std::string(source) + ": has " + std::to_string(text.size()) + " bytes, at most " +
                std::to_string(limits.bytes) + " are allowed");
  }
  return Parser(text, source, limits).run();
}

std::string dump(const Value& value) {
  std::string out;
  append(out, value, /*indent=*/2, 0);
  return out + "\n";
}

std::string dump_line(const Value& value) {
  std::string out;
  append(out, value, /*indent=*/0, 0);
  return out;
}

std::string quote(std::string_view text) {
  std::string out;
  text::append_json_string(out, text);
  return out;
}

}  // namespace monograph::json
