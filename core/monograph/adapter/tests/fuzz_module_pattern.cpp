// libFuzzer: any bytes as a pattern, a line feed, and a module's name. An accepted pattern answers
// as its group, as two of itself and before every prefix that PEFT's rule lets stand.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "monograph/adapter/module_pattern.h"
#include "monograph/base/error.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using monograph::ModulePattern;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::size_t cut = input.find('\n');
  const std::string text(input.substr(0, cut));
  const std::string name(cut == std::string_view::npos ? "" : input.substr(cut + 1));
  try {
    const ModulePattern pattern(text, "fuzz");
    const bool found = pattern.matches(name);
    require(!found || pattern.size() > 0);
    // A pattern that was accepted stays one inside a group, unless the limits are met there.
    try {
      require(ModulePattern("(" + text + ")", "group").matches(name) == found);
      require(ModulePattern(text + "|" + text, "either").matches(name) == found);
    } catch (const monograph::Error&) {
      require(text.size() > 400 || text.find_first_of("({") != std::string::npos);
    }
    // ".*\." takes any prefix but a line feed; "^" alone may tell where the name begins.
    if (found && text.find('^') == std::string::npos) require(pattern.matches("layers.0." + name));
  } catch (const monograph::Error&) {
  }
  return 0;
}
