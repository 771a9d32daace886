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
