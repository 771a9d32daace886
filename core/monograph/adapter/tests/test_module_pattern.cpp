#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "monograph/adapter/module_pattern.h"
#include "monograph/files/tests/temporary_folder.h"

namespace monograph {
namespace {

using files::error_of;

bool matches(const char* pattern, const char* module) {
  return ModulePattern(pattern, "test").matches(module);
}

TEST(ModulePattern, MatchesTheEndOfAModuleAtADot) {
  EXPECT_TRUE(matches("q_proj", "q_proj"));
  EXPECT_TRUE(matches("q_proj", "model.layers.0.self_attn.q_proj"));
  EXPECT_FALSE(matches("q_proj", "model.layers.0.self_attn.xq_proj"));
  EXPECT_FALSE(matches("q_proj", "model.q_proj.inner"));
  EXPECT_TRUE(matches("layers.0.q", "model.layers.0.q"));
  EXPECT_TRUE(matches("layersX0.q", "layersX0.q"));
  EXPECT_TRUE(matches("layers.0.q", "layersX0.q"));  // a dot is any character
  EXPECT_FALSE(matches("layers\\.0.q", "layersX0.q"));
}

TEST(ModulePattern, AnchorsAlternativesClassesAndCounts) {
  EXPECT_TRUE(matches("^model.a", "model.a"));
  EXPECT_FALSE(matches("^a", "model.a"));
  EXPECT_TRUE(matches("a$", "model.a"));
  EXPECT_TRUE(matches(".*layers\\.(0|1[0-2])\\.(up|down)_proj", "m.layers.11.down_proj"));
  EXPECT_FALSE(matches(".*layers\\.(0|1[0-2])\\.(up|down)_proj", "m.layers.13.down_proj"));
  EXPECT_TRUE(matches("a|b", "x.b"));
  EXPECT_TRUE(matches("x(?:ab){2,3}", "xababab"));
  EXPECT_FALSE(matches("x(?:ab){2,3}", "xabababab"));
  EXPECT_TRUE(matches("x{2,}y?", "xxx"));
  EXPECT_TRUE(matches("\\w+\\d{2}", "m.layer12"));
  EXPECT_FALSE(matches("\\D+", "m.1"));
  EXPECT_TRUE(matches("[^a-c]]", "d]"));
  EXPECT_TRUE(matches("[]a]", "]"));
  EXPECT_TRUE(matches("[a\\-]+?", "a-"));
  EXPECT_TRUE(matches("", ""));
  EXPECT_TRUE(matches("", "model."));
  EXPECT_FALSE(matches("", "model"));
}

TEST(ModulePattern, RefusesWhatItDoesNotKnow) {
  const char* kBad[] = {"(",       ")",        "[a",   "a**",    "*a",         "(?=a)",
                        "(?i)a",   "a\\1",     "\\ba", "a{3,2}", "a{",         "a{1001}",
                        "\\",      "[z-a]",    "^*",   "a\n",    "\\xff",      "a++",
                        "[\\d-z]", "(?P<n>a)", "{1}",  "a|*",    "caf\xc3\xa9"};
  for (const char* pattern : kBad) {
    EXPECT_NE(error_of([&] { ModulePattern(pattern, "test"); }), "no error") << pattern;
  }
}

TEST(ModulePattern, HostilePatternsTakeNoTime) {
  const auto start = std::chrono::steady_clock::now();
  const std::string name(5000, 'a');
  EXPECT_FALSE(ModulePattern("(a*)*b", "test").matches(name));
  EXPECT_FALSE(ModulePattern("(a|a)*b", "test").matches(name));
  EXPECT_FALSE(ModulePattern("(.*.*.*.*.*.*)*b", "test").matches(name));
  for (const char* pattern : {"((a{1000}){1000}){1000}", "((((){1000}){1000}){1000}){1000}"}) {
    EXPECT_NE(error_of([&] { ModulePattern(pattern, "test"); }).find("too large"),
              std::string::npos);
  }
  const std::string deep = std::string(400, '(') + "a" + std::string(400, ')');
  EXPECT_NE(error_of([&] { ModulePattern(deep, "test"); }).find("50 groups"), std::string::npos);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
}

}  // namespace
}  // namespace monograph
