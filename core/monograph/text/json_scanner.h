// A strict pull scanner for RFC 8259 JSON in untrusted headers and indexes. It is not a document
// model: the caller asks for what its grammar allows next, so nothing is built before it is wanted.
//
// Why not a library: headers go up to 100 MB and a hostile one must be refused in under 1 s and
// 200 MB. nlohmann's SAX parser took 1.3 s for 100 MB of entries and 258-330 MB for 100 MB of
// blanks or one long string (it copies every character into a token), skips a byte order mark and
// reads a NUL byte as the end of the input; the Rust reader refuses both. It serves the tests and
// the fuzzers as a second opinion instead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>

#include "monograph/base/function_ref.h"

namespace monograph::text {

class JsonScanner {
 public:
  // `source` names the text in messages. Both views must outlive the scanner.
  JsonScanner(std::string_view text, std::string_view source) : text_(text), source_(source) {}

  // Blanks are space, tab, line feed and carriage return, and are skipped before every token.
  // The next byte that is not blank, unconsumed; 0 at the end (no token begins with a NUL byte).
  char peek();
  void expect(char token);
  bool accept(char token);
  void expect_end();

  // A string, decoded: well-formed UTF-8, no lone surrogates, no raw control characters. The view
  // is valid while both the scanner and the text live.
  std::string_view string();
  void skip_string();  // as string(), without keeping it
  // The text of a number that follows the JSON grammar, whatever its size.
  std::string_view number();
  // A number made of digits only that fits 64 bits: no sign, fraction or exponent, not even -0.
  std::uint64_t unsigned_integer();

  // Calls member(key) with the scanner at each value of an object; member must consume the value.
  void object(FunctionRef<void(std::string_view key)> member);
  // Calls element() with the scanner at each element of an array.
  void array(FunctionRef<void()> element);
  // Consumes `word` if it stands here. For words that are not JSON (NaN) and yet are written.
  bool accept_word(std::string_view word);
  // Any one value, checked for syntax. At most `depth` containers inside one another.
  void skip_value(int depth);

  std::size_t position() const { return position_; }
  // What messages name from now on, such as ("tensor", its name); an empty name for nothing.
  void set_subject(std::string_view kind, std::string_view name) {
    subject_kind_ = kind;
    subject_ = name;
  }
  // Throws Error: source, subject, position and `what`.
  [[noreturn]] void fail(const std::string& what) const;

 private:
  [[noreturn]] void fail_expected(std::string_view wanted) const;
  void skip_blanks();
  void skip_literal(std::string_view literal);
  void skip_digits();
  void check_escape();
  std::uint32_t hex4();
  // Between the quotes, as written; `escaped` tells whether it must be decoded.
  std::string_view raw_string(bool& escaped);
  std::string_view decode(std::string_view raw);

  std::string_view text_, source_, subject_kind_, subject_;
  std::size_t position_ = 0;
  // Strings that had escapes, packed into blocks that never grow past their reserved capacity.
  std::deque<std::string> decoded_;
};

// Some key that occurs more than once among key_at(0) ... key_at(count - 1). n log n whatever the
// keys are; no hash table that chosen keys could flood. count must be below 2^32.
std::optional<std::string_view> find_duplicate(std::size_t count,
                                               FunctionRef<std::string_view(std::size_t)> key_at);

}  // namespace monograph::text
