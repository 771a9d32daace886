// UTF-8 by hand: checking, encoding, and text that is safe to print.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace monograph::text {

// 0 past the end.
inline unsigned char byte_at(std::string_view text, std::size_t i) {
  return i < text.size() ? static_cast<unsigned char>(text[i]) : 0;
}

// The length of the well-formed UTF-8 sequence of 2 to 4 bytes that begins `text`, else 0: table
// 3-7 of the Unicode standard (no overlong forms, no surrogates, nothing above U+10FFFF).
std::size_t utf8_sequence_length(std::string_view text);

// Whether all of `text` is well-formed.
bool is_utf8(std::string_view text);

// code <= 0x10ffff.
void append_utf8(std::string& out, std::uint32_t code);

// `text` as a JSON string, in quotes. The escapes of serde_json, for equal bytes: short forms where
// JSON has one, else \u00xx in lower case; everything from 0x20 up stands for itself.
void append_json_string(std::string& out, std::string_view text);

// Text for an error message: in quotes, control characters and bytes that are not UTF-8 escaped (a
// name may hold terminal escape sequences), cut after 120 bytes.
std::string in_quotes(std::string_view text);

}  // namespace monograph::text
