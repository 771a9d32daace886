#include "monograph/train/recipe_scalar.h"

#include <algorithm>
#include <charconv>
#include <cstdint>

#include "monograph/base/error.h"
#include "monograph/text/utf8.h"

namespace monograph::train {
namespace {

using Kind = RecipeValue::Kind;
constexpr int kMostDepth = 32;
constexpr std::string_view kDigits = "0123456789_";

bool only(std::string_view text, std::string_view of) {
  return text.find_first_not_of(of) == std::string_view::npos;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

std::string_view without_sign(std::string_view text) {
  if (text.starts_with('+') || text.starts_with('-')) text.remove_prefix(1);
  return text;
}

std::string without_underscores(std::string_view text) {
  std::string digits(text.substr(text.starts_with('+') ? 1 : 0));
  std::erase(digits, '_');
  return digits;
}

bool is_decimal(std::string_view text) {
  const std::string_view digits = without_sign(text);
  return digits == "0" ||
         (!digits.empty() && digits[0] >= '1' && digits[0] <= '9' && only(digits, kDigits));
}

// With a point; the sign of an exponent must be written, and a number that begins with its point
// has none.
bool is_float(std::string_view text) {
  std::string_view rest = text.starts_with('.') ? text : without_sign(text);
  const std::size_t point = rest.find('.');
  if (point == std::string_view::npos || !only(rest.substr(0, point), kDigits)) return false;
  if (point > 0 && !is_digit(rest[0])) return false;
  if (point == 0 && (text[0] != '.' || rest.size() < 2 || !is_digit(rest[1]))) return false;
  rest.remove_prefix(point + 1);
  const std::size_t exponent = rest.find_first_of("eE");
  if (!only(rest.substr(0, exponent), kDigits)) return false;
  if (exponent == std::string_view::npos) return true;
  const std::string_view power = rest.substr(exponent + 1);
  return power.size() > 1 && without_sign(power).size() + 1 == power.size() &&
         only(power.substr(1), "0123456789");
}

// 010, 0x1f, 0b1, 1:30, .inf, .nan, 2026-01-31, = and <<: YAML 1.1 has a meaning for them.
bool is_odd(std::string_view text) {
  const std::string_view digits = without_sign(text);
  if (text == "=" || text == "<<") return true;
  for (const char* word : {".inf", ".Inf", ".INF", ".nan", ".NaN", ".NAN"})
    if (digits == word) return true;
  if (digits.size() > 1 && digits[0] == '0' &&
      (only(digits, "01234567_") ||
       (digits[1] == 'x' && only(digits.substr(2), "0123456789abcdefABCDEF_")) ||
       (digits[1] == 'b' && only(digits.substr(2), "01_"))))
    return true;
  if (!digits.empty() && is_digit(digits[0]) && digits.find(':') != std::string_view::npos &&
      only(digits, "0123456789_:."))
    return true;
  const bool date = text.size() >= 8 && only(text.substr(0, 4), "0123456789") && text[4] == '-' &&
                    is_digit(text[5]);
  return date && only(text, "0123456789-:.+ TtZ");
}

RecipeValue bool_value(std::string_view text, bool truth) {
  RecipeValue value;
  value.kind = Kind::kBool;
  value.text = std::string(text);
  value.truth = truth;
  return value;
}

RecipeValue number_value(std::string_view text, Kind kind) {
  RecipeValue value;
  value.kind = kind;
  value.text = std::string(text);
  const std::string digits = without_underscores(text);
  const char* const end = digits.data() + digits.size();
  std::errc wrong = std::from_chars(digits.data(), end, value.number).ec;
  if (kind == Kind::kWhole && wrong == std::errc())
    wrong = std::from_chars(digits.data(), end, value.whole).ec;
  if (wrong != std::errc()) throw Error("has " + value.text + ", a number that is too large");
  return value;
}

class Line {
 public:
  explicit Line(std::string_view text) : text_(text) {}

  RecipeValue whole() {
    RecipeValue value = is_open() ? flow(0) : quote() ? text_value(quoted()) : plain();
    blanks();
    if (at_ < text_.size() && !(text_[at_] == '#' && text_[at_ - 1] == ' '))
      throw Error("has '" + std::string(text_.substr(at_)) + "' behind a value");
    return value;
  }

  // Of a key in quotes, and the colon behind it.
  std::size_t colon_behind_quotes(std::string* key) {
    *key = quoted();
    blanks();
    const bool colon = peek() == ':' && (at_ + 1 == text_.size() || text_[at_ + 1] == ' ');
    return colon ? at_ : std::string_view::npos;
  }

 private:
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  bool is_open() const { return peek() == '[' || peek() == '{'; }
  bool quote() const { return peek() == '"' || peek() == '\''; }
  void blanks() {
    while (peek() == ' ') ++at_;
  }

  static void check_first(std::string_view text, std::string_view refused) {
    const bool dash = text == "-" || text.starts_with("- ");
    if (dash || refused.find(text[0]) != std::string_view::npos)
      throw Error("has '" + std::string(text) + "', which is no plain scalar");
    if (text.find('\t') != std::string_view::npos)
      throw Error("has a tab in '" + std::string(text) + "', wanted blanks");
  }

  RecipeValue plain() {
    const std::size_t end = std::min(text_.find(" #"), text_.size());
    std::string_view text = text_.substr(0, end);
    while (text.ends_with(' ')) text.remove_suffix(1);
    at_ = end;
    if (end < text_.size()) ++at_;
    if (text.empty()) throw Error("has an empty value");
    check_first(text, "&*!|>%@`]},?:");
    if (text.find(": ") != std::string_view::npos || text.ends_with(':'))
      throw Error("has '" + std::string(text) + "', a key inside of a value; quote it");
    return plain_scalar(text);
  }

  std::string_view flow_plain_text() {
    const std::size_t begin = at_;
    for (; at_ < text_.size(); ++at_) {
      const char c = text_[at_], next = at_ + 1 < text_.size() ? text_[at_ + 1] : ' ';
      if (std::string_view(",[]{}").find(c) != std::string_view::npos) break;
      if (c == ':' && std::string_view(" ,[]{}").find(next) != std::string_view::npos) break;
      if (c == ' ' && next == '#') throw Error("has a list that goes on in another line");
    }
    std::string_view text = text_.substr(begin, at_ - begin);
    while (text.ends_with(' ')) text.remove_suffix(1);
    if (text.empty()) throw Error("has an empty item");
    check_first(text, "&*!|>%@`?:#");
    if (text.find('?') != std::string_view::npos)
      throw Error("has '" + std::string(text) + "', wanted it in quotes");
    return text;
  }

  RecipeValue flow(int depth) {
    if (depth > kMostDepth) throw Error("has lists inside one another, too deep");
    blanks();
    if (quote()) return text_value(quoted());
    if (!is_open()) return plain_scalar(flow_plain_text());
    const bool list = text_[at_++] == '[';
    RecipeValue value;
    value.kind = list ? Kind::kList : Kind::kMapping;
    for (blanks(); peek() != (list ? ']' : '}'); blanks()) {
      if (at_ == text_.size())
        throw Error(std::string("has a ") + (list ? "list" : "mapping") +
                    " that goes on in another line");
      if (list) {
        value.items.push_back(flow(depth + 1));
      } else {
        add_member(value, depth);
      }
      blanks();
      if (peek() == ',')
        ++at_;
      else if (peek() != (list ? ']' : '}') && at_ < text_.size())
        throw Error("has '" + std::string(text_.substr(at_)) + "', wanted a comma");
    }
    ++at_;
    return value;
  }

  void add_member(RecipeValue& mapping, int depth) {
    RecipeEntry entry;
    entry.key = quote() ? quoted() : key_in(flow_plain_text());
    for (const RecipeEntry& other : mapping.members)
      if (other.key == entry.key) throw Error("has " + entry.key + " twice");
    blanks();
    if (peek() == ':') {
      ++at_;
      blanks();
      if (peek() != ',' && peek() != '}') entry.value = flow(depth + 1);
    }
    mapping.members.push_back(std::move(entry));
  }

  std::string quoted() {
    const char mark = text_[at_++];
    std::string found;
    while (at_ < text_.size()) {
      const char c = text_[at_++];
      if (c == mark && mark == '\'' && peek() == '\'') {
        found += text_[at_++];
      } else if (c == mark) {
        return found;
      } else if (c == '\\' && mark == '"') {
        escape(found);
      } else {
        found += c;
      }
    }
    throw Error("has quotes that are not closed in their line");
  }

  void escape(std::string& to) {
    constexpr std::string_view kFrom = "abtnvfre \"\\/";
    constexpr std::string_view kTo = "\a\b\t\n\v\f\r\x1b \"\\/";
    const char c = peek();
    ++at_;
    if (const std::size_t found = c == '\0' ? kFrom.npos : kFrom.find(c); found != kFrom.npos) {
      to += kTo[found];
      return;
    }
    const std::size_t count = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    const std::string_view digits = text_.substr(std::min(at_, text_.size())).substr(0, count);
    std::uint32_t code = 0;
    const char* const end = digits.data() + digits.size();
    const bool whole = count > 0 && digits.size() == count && digits[0] != '-' &&
                       std::from_chars(digits.data(), end, code, 16).ptr == end;
    if (!whole || code == 0 || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000))
      throw Error("has \\" + std::string(1, c > ' ' && c < 0x7F ? c : '?') +
                  " in quotes, which is no escape of a character");
    at_ += count;
    text::append_utf8(to, code);
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace

RecipeValue plain_scalar(std::string_view text) {
  if (text.empty() || text == "~" || text == "null" || text == "Null" || text == "NULL") return {};
  for (const char* word : {"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"})
    if (text == word) return bool_value(text, true);
  for (const char* word : {"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"})
    if (text == word) return bool_value(text, false);
  if (is_decimal(text)) return number_value(text, Kind::kWhole);
  if (is_float(text)) return number_value(text, Kind::kNumber);
  if (is_odd(text))
    throw Error("has " + std::string(text) +
                ", which is no text to YAML; wanted decimal digits, or quotes around it");
  return text_value(std::string(text));
}

RecipeValue inline_value(std::string_view text) { return Line(text).whole(); }

std::size_t colon_of_key(std::string_view line) {
  if (line.starts_with('"') || line.starts_with('\'')) {
    std::string key;
    return Line(line).colon_behind_quotes(&key);
  }
  for (std::size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '#' && i > 0 && line[i - 1] == ' ') break;
    if (line[i] == '[' || line[i] == '{')
      if (i == 0) break;
    if (line[i] == ':' && (i + 1 == line.size() || line[i + 1] == ' ')) return i;
  }
  return std::string_view::npos;
}

std::string key_in(std::string_view text) {
  while (text.ends_with(' ')) text.remove_suffix(1);
  if (text.starts_with('"') || text.starts_with('\'')) {
    std::string key;
    Line(text).colon_behind_quotes(&key);
    return key;
  }
  const RecipeValue key = inline_value(text);
  if (!key.is(Kind::kText)) throw Error("has the key " + shown(key) + ", wanted text; quote it");
  return key.text;
}

}  // namespace monograph::train
