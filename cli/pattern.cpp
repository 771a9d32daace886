#include "pattern.h"

#include <algorithm>
#include <regex>

#include "monograph/base/error.h"
#include "monograph/text/utf8.h"
#include "usage_error.h"

namespace monograph::cli {
namespace {

constexpr std::size_t kLongestName = 1000;

std::regex compile(const std::string& text) {
  try {
    return std::regex(text, std::regex::ECMAScript | std::regex::optimize);
  } catch (const std::regex_error&) {
    throw UsageError("'" + text + "' is not a regular expression");
  }
}

}  // namespace

struct Pattern::Regex {
  std::regex compiled;
};

Pattern::Pattern(const std::string& text)
    : regex_(std::make_shared<const Regex>(Regex{compile(text)})) {}

bool Pattern::matches(std::string_view name) const {
  if (name.size() > kLongestName) {
    throw Error("name " + text::in_quotes(name) + ": has " + std::to_string(name.size()) +
                " characters; patterns match names of at most " + std::to_string(kLongestName));
  }
  return std::regex_search(name.begin(), name.end(), regex_->compiled);
}

std::vector<Pattern> patterns(const std::vector<std::string>& texts) {
  return {texts.begin(), texts.end()};
}

bool any_matches(const std::vector<Pattern>& patterns, std::string_view name) {
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const Pattern& pattern) { return pattern.matches(name); });
}

}  // namespace monograph::cli
