#include "program_name.h"

#include <cstddef>
#include <string_view>

namespace monograph::cli {
namespace {

constexpr std::string_view kName = "monograph";
constexpr const char* kAlone = "monograph-tool";

// Not glibc's program_invocation_short_name: a program that is linked for an older glibc
// (tools/release/link_stubs.py) has a copy of it that nobody writes.
bool alone = false;

// Of "monograph merge", "monograph --help" and "monograph COMMAND", not of "python3 -m monograph".
bool is_command(std::string_view text, std::size_t at) {
  const std::string_view before = text.substr(0, at), after = text.substr(at + kName.size());
  if (before.ends_with("-m ") || (!before.empty() && before.back() == '-')) return false;
  if (after.size() < 2 || after[0] != ' ') return false;
  return (after[1] >= 'a' && after[1] <= 'z') || after.starts_with(" --") ||
         after.starts_with(" COMMAND");
}

}  // namespace

void take_program_name(const char* called) {
  const std::string_view path = called == nullptr ? "" : called;
  alone = path.substr(path.rfind('/') + 1) == kAlone;
}

bool is_tool_alone() { return alone; }

const char* program_name() { return is_tool_alone() ? kAlone : kName.data(); }

std::string as_called(std::string text) {
  if (!is_tool_alone()) return text;
  const std::string_view name = program_name();
  for (std::size_t at = text.find(kName); at != std::string::npos;
       at = text.find(kName, at + name.size())) {
    if (is_command(text, at)) text.replace(at, kName.size(), name);
  }
  return text;
}

}  // namespace monograph::cli
