// Text for messages, and duplicate keys.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "monograph/text/json_scanner.h"
#include "monograph/text/utf8.h"

namespace monograph::text {
namespace {

TEST(Text, QuotesAreSafeToPrint) {
  EXPECT_EQ(in_quotes("a\x1b[31m\n"), R"('a\x1b[31m\x0a')");
  EXPECT_EQ(in_quotes("\xc2\x9b"
                      "31m\xff"),
            R"('\xc2\x9b31m\xff')");
  EXPECT_EQ(in_quotes("\xc3\xa9\x7f"), "'\xc3\xa9\\x7f'");
  EXPECT_EQ(in_quotes(std::string(119, 'a') + "\xc3\xa9z"),
            "'" + std::string(119, 'a') + "\xc3\xa9...'");
}

TEST(Text, EveryCodePointIsUtf8AndNoSurrogateIs) {
  for (std::uint32_t code = 0; code <= 0x10ffff; ++code) {
    std::string text = "a";
    append_utf8(text, code);
    const bool surrogate = code >= 0xd800 && code < 0xe000;
    ASSERT_EQ(is_utf8(text + "b"), !surrogate) << code;
    if (code < 0x80) continue;
    text.pop_back();
    ASSERT_FALSE(is_utf8(text)) << code;
    ASSERT_FALSE(is_utf8(text + "b")) << code;
  }
  EXPECT_TRUE(is_utf8(""));
}

TEST(Text, PairsOfBytesThatAreUtf8) {
  int found = 0;
  for (int pair = 0; pair < 65536; ++pair) {
    found += is_utf8(std::string{static_cast<char>(pair >> 8), static_cast<char>(pair)});
  }
  EXPECT_EQ(found, 128 * 128 + (0x800 - 0x80));
}

TEST(Text, FindsDuplicatesAmongManyKeys) {
  std::vector<std::string> keys;
  for (int i = 0; i < 10000; ++i) keys.push_back("key" + std::to_string(i));
  const auto key_at = [&](std::size_t i) { return std::string_view(keys[i]); };
  EXPECT_FALSE(find_duplicate(keys.size(), key_at));
  keys.push_back("key4711");
  EXPECT_EQ(find_duplicate(keys.size(), key_at), "key4711");
  EXPECT_FALSE(find_duplicate(0, key_at));
}

}  // namespace
}  // namespace monograph::text
