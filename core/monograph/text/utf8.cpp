#include "monograph/text/utf8.h"

namespace monograph::text {

std::size_t utf8_sequence_length(std::string_view text) {
  const unsigned char lead = byte_at(text, 0);
  unsigned char low = 0x80, high = 0xbf;
  std::size_t length = 0;
  if (lead >= 0xc2 && lead <= 0xdf) {
    length = 2;
  } else if (lead >= 0xe0 && lead <= 0xef) {
    length = 3;
    if (lead == 0xe0) low = 0xa0;
    if (lead == 0xed) high = 0x9f;
  } else if (lead >= 0xf0 && lead <= 0xf4) {
    length = 4;
    if (lead == 0xf0) low = 0x90;
    if (lead == 0xf4) high = 0x8f;
  } else {
    return 0;
  }
  const unsigned char second = byte_at(text, 1);
  if (second < low || second > high) return 0;
  for (std::size_t i = 2; i < length; ++i) {
    if ((byte_at(text, i) & 0xc0) != 0x80) return 0;
  }
  return length;
}

bool is_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length =
        byte_at(text, i) < 0x80 ? 1 : utf8_sequence_length(text.substr(i, 4));
    if (length == 0) return false;
    i += length;
  }
  return true;
}

void append_utf8(std::string& out, std::uint32_t code) {
  const auto put = [&out](std::uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xc0 | code >> 6);
    put(0x80 | (code & 0x3f));
  } else if (code < 0x10000) {
    put(0xe0 | code >> 12);
    put(0x80 | (code >> 6 & 0x3f));
    put(0x80 | (code & 0x3f));
  } else {
    put(0xf0 | code >> 18);
    put(0x80 | (code >> 12 & 0x3f));
    put(0x80 | (code >> 6 & 0x3f));
    put(0x80 | (code & 0x3f));
  }
}

std::string in_quotes(std::string_view text) {
  constexpr std::size_t kLongestQuote = 120;
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string out = "'";
  std::size_t i = 0;
  while (i < text.size() && i < kLongestQuote) {
    const unsigned char c = byte_at(text, i);
    const std::size_t sequence = utf8_sequence_length(text.substr(i, 4));
    // C1 controls (0xc2 0x80-0x9f) steer terminals as the ASCII ones do.
    const bool c1 = c == 0xc2 && byte_at(text, i + 1) < 0xa0;
    if (sequence != 0 && !c1) {
      out += text.substr(i, sequence);
      i += sequence;
    } else if (c >= 0x20 && c < 0x7f) {
      out += text[i++];
    } else {
      out += "\\x";
      out += kHex[c >> 4];
      out += kHex[c & 15];
      ++i;
    }
  }
  if (i < text.size()) out += "...";
  return out + "'";
}

void append_json_string(std::string& out, std::string_view text) {
  constexpr std::string_view kHex = "0123456789abcdef";
  out += '"';
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte >= 0x20) {
      out += c;
    } else if (const auto letter = std::string_view("\b\f\n\r\t").find(c);
               letter != std::string_view::npos) {
      out += '\\';
      out += "bfnrt"[letter];
    } else {
      out += "\\u00";
      out += kHex[byte >> 4];
      out += kHex[byte & 15];
    }
  }
  out += '"';
}

}  // namespace monograph::text
