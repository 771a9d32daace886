#include "next_step.h"

#include <cstdio>
#include <string_view>

#include "model.h"
#include "program_name.h"

namespace monograph::cli {

void say_next(const Session& session, const std::string& text) {
  std::fflush(stdout);  // its end is the last line, also where both go to one file
  session.note("Next: " + as_called(text));
}

std::string shell_word(const std::string& path) {
  std::string text = printable(path);
  const auto is_plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           std::string_view("/._-+=,:@%").find(c) != std::string_view::npos;
  };
  bool plain = !text.empty();
  for (const char c : text) plain = plain && is_plain(c);
  if (plain || text != path)
    return text;  // what no terminal can show is escaped, and for reading only
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

}  // namespace monograph::cli
