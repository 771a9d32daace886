// Regular expressions of the person over names of a file.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace monograph::cli {

// ECMAScript syntax. `matches` looks anywhere in the name; use ^ and $ to anchor.
class Pattern {
 public:
  // Throws UsageError (exit code 2) if `text` is no regular expression.
  explicit Pattern(const std::string& text);

  // Throws Error for a name above 1000 characters: the library's matcher recurses on each.
  bool matches(std::string_view name) const;

 private:
  struct Regex;  // <regex> takes a second to compile: pattern.cpp alone includes it
  std::shared_ptr<const Regex> regex_;
};

std::vector<Pattern> patterns(const std::vector<std::string>& texts);
bool any_matches(const std::vector<Pattern>& patterns, std::string_view name);

}  // namespace monograph::cli
