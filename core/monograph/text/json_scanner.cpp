#include "monograph/text/json_scanner.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <functional>
#include <vector>

#include "monograph/base/error.h"
#include "monograph/text/utf8.h"

namespace monograph::text {
namespace {

constexpr std::size_t kBlockBytes = 1 << 16;

// Bytes of a string that need no look: ASCII without quote, backslash and control characters.
constexpr std::array<bool, 256> kPlain = [] {
  std::array<bool, 256> plain{};
  for (std::size_t c = 0x20; c < 0x80; ++c) plain[c] = c != '"' && c != '\\';
  return plain;
}();

// What may follow a backslash.
constexpr std::array<bool, 256> kEscape = [] {
  std::array<bool, 256> escape{};
  for (const char c : {'"', '\\', '/', 'b', 'f', 'n', 'r', 't', 'u'}) {
    escape[static_cast<unsigned char>(c)] = true;
  }
  return escape;
}();

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The value of four hexadecimal digits that were checked before.
std::uint32_t hex_value(std::string_view digits) {
  std::uint32_t value = 0;
  std::from_chars(digits.data(), digits.data() + 4, value, 16);
  return value;
}

char escaped_char(char letter) {
  switch (letter) {
    case 'b':
      return '\b';
    case 'f':
      return '\f';
    case 'n':
      return '\n';
    case 'r':
      return '\r';
    case 't':
      return '\t';
    default:
      return letter;  // the quote, the backslash and the slash stand for themselves
  }
}

}  // namespace

void JsonScanner::fail(const std::string& what) const {
  std::string message(source_);
  if (!subject_.empty()) {
    message.append(": ").append(subject_kind_).append(" ").append(in_quotes(subject_));
  }
  throw Error(message + ": JSON byte " + std::to_string(position_) + ": " + what);
}

void JsonScanner::fail_expected(std::string_view wanted) const {
  const bool end = position_ >= text_.size();
  fail("found " + (end ? "the end" : in_quotes(text_.substr(position_, 1))) + ", wanted " +
       std::string(wanted));
}

void JsonScanner::skip_blanks() {
  while (position_ < text_.size()) {
    const char c = text_[position_];
    if (c != ' ' && c != '\t' && c != '\n' && c != '\r') return;
    ++position_;
  }
}

char JsonScanner::peek() {
  skip_blanks();
  return position_ < text_.size() ? text_[position_] : '\0';
}

bool JsonScanner::accept(char token) {
  skip_blanks();
  if (position_ >= text_.size() || text_[position_] != token) return false;
  ++position_;
  return true;
}

void JsonScanner::expect(char token) {
  if (!accept(token)) fail_expected(in_quotes(std::string_view(&token, 1)));
}

void JsonScanner::expect_end() {
  skip_blanks();
  if (position_ != text_.size()) fail_expected("the end");
}

std::uint32_t JsonScanner::hex4() {
  for (int i = 0; i < 4; ++i, ++position_) {
    const unsigned char c = byte_at(text_, position_);
    const unsigned char lower = c | 0x20;
    const bool hex = (c >= '0' && c <= '9') || (lower >= 'a' && lower <= 'f');
    if (!hex) fail_expected("four hexadecimal digits after \\u");
  }
  return hex_value(text_.substr(position_ - 4, 4));
}

void JsonScanner::check_escape() {
  ++position_;
  const unsigned char letter = byte_at(text_, position_);
  if (!kEscape[letter]) fail_expected("an escape that JSON knows");
  ++position_;
  if (letter != 'u') return;
  const std::uint32_t code = hex4();
  if (code < 0xd800 || code > 0xdfff) return;
  const bool pair = code < 0xdc00 && text_.substr(position_, 2) == "\\u";
  if (!pair) fail("a lone surrogate is not a character");
  position_ += 2;
  const std::uint32_t second = hex4();
  if (second < 0xdc00 || second > 0xdfff) fail("a lone surrogate is not a character");
}

std::string_view JsonScanner::decode(std::string_view raw) {
  // Decoding never lengthens: 6 bytes of escape give at most 3, 12 give 4.
  if (decoded_.empty() || decoded_.back().capacity() - decoded_.back().size() < raw.size()) {
    decoded_.emplace_back().reserve(std::max(kBlockBytes, raw.size()));
  }
  std::string& out = decoded_.back();
  const std::size_t begin = out.size();
  for (std::size_t i = 0; i < raw.size();) {
    if (raw[i] != '\\') {
      out.push_back(raw[i++]);
      continue;
    }
    if (raw[i + 1] != 'u') {
      out.push_back(escaped_char(raw[i + 1]));
      i += 2;
      continue;
    }
    std::uint32_t code = hex_value(raw.substr(i + 2));
    i += 6;
    if (code >= 0xd800 && code <= 0xdfff) {
      code = 0x10000 + ((code & 0x3ff) << 10 | (hex_value(raw.substr(i + 2)) & 0x3ff));
      i += 6;
    }
    append_utf8(out, code);
  }
  return std::string_view(out).substr(begin);
}

std::string_view JsonScanner::raw_string(bool& escaped) {
  skip_blanks();
  if (byte_at(text_, position_) != '"') fail_expected("a string");
  const std::size_t begin = ++position_;
  escaped = false;
  for (;;) {
    while (position_ < text_.size() && kPlain[byte_at(text_, position_)]) ++position_;
    if (position_ >= text_.size()) fail_expected("the end of a string");
    const unsigned char c = byte_at(text_, position_);
    if (c == '"') break;
    if (c == '\\') {
      escaped = true;
      check_escape();
    } else if (c < 0x80) {
      fail_expected("no control character in a string");
    } else {
      const std::size_t length = utf8_sequence_length(text_.substr(position_, 4));
      if (length == 0) fail("not UTF-8");
      position_ += length;
    }
  }
  const std::string_view raw = text_.substr(begin, position_ - begin);
  ++position_;
  return raw;
}

std::string_view JsonScanner::string() {
  bool escaped = false;
  const std::string_view raw = raw_string(escaped);
  return escaped ? decode(raw) : raw;
}

void JsonScanner::skip_string() {
  bool escaped = false;
  raw_string(escaped);
}

void JsonScanner::skip_digits() {
  if (!is_digit(static_cast<char>(byte_at(text_, position_)))) fail_expected("a digit");
  while (is_digit(static_cast<char>(byte_at(text_, position_)))) ++position_;
}

std::string_view JsonScanner::number() {
  skip_blanks();
  const std::size_t begin = position_;
  if (byte_at(text_, position_) == '-') ++position_;
  // A leading zero ends the whole part: 01 is two tokens and so an error of the caller's grammar.
  if (byte_at(text_, position_) == '0') {
    ++position_;
  } else {
    skip_digits();
  }
  if (byte_at(text_, position_) == '.') {
    ++position_;
    skip_digits();
  }
  if ((byte_at(text_, position_) | 0x20) == 'e') {
    ++position_;
    const unsigned char sign = byte_at(text_, position_);
    if (sign == '+' || sign == '-') ++position_;
    skip_digits();
  }
  return text_.substr(begin, position_ - begin);
}

std::uint64_t JsonScanner::unsigned_integer() {
  const char first = peek();
  if (first != '-' && !is_digit(first)) fail_expected("a whole number");
  const std::string_view digits = number();
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size()) {
    fail("number " + in_quotes(digits) + ", wanted a whole number from 0 to 2^64 - 1");
  }
  return value;
}

void JsonScanner::object(FunctionRef<void(std::string_view key)> member) {
  expect('{');
  if (accept('}')) return;
  do {
    const std::string_view key = string();
    expect(':');
    member(key);
  } while (accept(','));
  expect('}');
}

void JsonScanner::array(FunctionRef<void()> element) {
  expect('[');
  if (accept(']')) return;
  do {
    element();
  } while (accept(','));
  expect(']');
}

bool JsonScanner::accept_word(std::string_view word) {
  skip_blanks();
  if (!text_.substr(position_).starts_with(word)) return false;
  position_ += word.size();
  return true;
}

void JsonScanner::skip_literal(std::string_view literal) {
  if (text_.substr(position_, literal.size()) != literal) fail_expected("a value");
  position_ += literal.size();
}

void JsonScanner::skip_value(int depth) {
  const char first = peek();
  if ((first == '{' || first == '[') && depth <= 0) fail("containers are nested too deeply");
  if (first == '{') {
    object([&](std::string_view) { skip_value(depth - 1); });
  } else if (first == '[') {
    array([&] { skip_value(depth - 1); });
  } else if (first == '"') {
    skip_string();
  } else if (first == '-' || is_digit(first)) {
    number();
  } else {
    skip_literal(first == 't' ? "true" : first == 'f' ? "false" : "null");
  }
}

std::optional<std::string_view> find_duplicate(std::size_t count,
                                               FunctionRef<std::string_view(std::size_t)> key_at) {
  struct Hashed {
    std::size_t hash;
    std::uint32_t index;
  };
  std::vector<Hashed> keys(count);
  for (std::size_t i = 0; i < count; ++i) {
    keys[i] = {std::hash<std::string_view>()(key_at(i)), static_cast<std::uint32_t>(i)};
  }
  // Names are compared only where hashes are equal: sorting 1 M names themselves takes 4x longer.
  std::sort(keys.begin(), keys.end(), [&](const Hashed& a, const Hashed& b) {
    return a.hash != b.hash ? a.hash < b.hash : key_at(a.index) < key_at(b.index);
  });
  const auto same = [&](const Hashed& a, const Hashed& b) {
    return a.hash == b.hash && key_at(a.index) == key_at(b.index);
  };
  const auto found = std::adjacent_find(keys.begin(), keys.end(), same);
  if (found == keys.end()) return std::nullopt;
  return key_at(found->index);
}

}  // namespace monograph::text
