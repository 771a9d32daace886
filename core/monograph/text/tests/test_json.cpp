#include <gtest/gtest.h>

#include <cmath>

#include "monograph/base/error.h"
#include "monograph/text/json_document.h"

namespace monograph::json {
namespace {

std::string error_of(const std::string& text) {
  try {
    parse(text, "x.json");
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(Json, KeepsOrderAndTheTextOfNumbers) {
  const std::string text = R"({"b": 1e-05, "a": [10000.0, -0, 18446744073709551615], "c": null})";
  EXPECT_EQ(dump_line(parse(text, "x")), text);
  EXPECT_EQ(parse(text, "x").find("a")->items()[2].as_unsigned(), UINT64_MAX);
}

TEST(Json, DumpsAsPythonDoesWithIndentTwo) {
  EXPECT_EQ(dump(parse(R"({"a":{},"b":[],"c":[1,{"d":true}]})", "x")),
            "{\n  \"a\": {},\n  \"b\": [],\n  \"c\": [\n    1,\n    {\n      \"d\": true\n    }\n  "
            "]\n}\n");
}

TEST(Json, ReadsTheWordsThatPythonWrites) {
  const Value value = parse("[NaN, Infinity, -Infinity, -1]", "x");
  EXPECT_EQ(dump_line(value), "[NaN, Infinity, -Infinity, -1]");
  EXPECT_TRUE(std::isinf(value.items()[1].as_double().value_or(0)));
  EXPECT_TRUE(std::isnan(value.items()[0].as_double().value_or(0)));
}

TEST(Json, RefusesDuplicatesDepthAndRest) {
  EXPECT_NE(error_of(R"({"a":1,"b":{"c":1,"\u0063":2}})").find("duplicate key 'c'"),
            std::string::npos);
  EXPECT_NE(error_of(std::string(65, '[')).find("nested too deeply"), std::string::npos);
  std::string many = "[0";
  for (std::size_t i = 0; i < Limits().values; ++i) many += ",0";
  EXPECT_NE(error_of(many + "]").find("more than 250000 values"), std::string::npos);
  EXPECT_NE(error_of(std::string(Limits().bytes + 1, ' ')).find("bytes, at most"),
            std::string::npos);
  EXPECT_EQ(error_of(std::string(64, '[') + std::string(64, ']')), "no error");
  for (const char* bad : {"", "{", "{}x", "[1,]", "nul", "tru", "01", "+1", "--Infinity", "NaNs",
                          "'a'", "{\"a\" 1}", "\"\xff\"", "\xef\xbb\xbf{}"}) {
    EXPECT_NE(error_of(bad), "no error") << bad;
  }
}

TEST(Json, SetReplacesInPlaceAndAppendsAtTheEnd) {
  Value value = parse(R"({"a": 1, "b": 2})", "x");
  value.set("a", Value::string("q\"\n"));
  value.set("c", Value::boolean(false));
  value.erase("b");
  EXPECT_EQ(dump_line(value), R"({"a": "q\"\n", "c": false})");
}

TEST(Json, NumbersReadBackTheSame) {
  for (const double x : {0.1, 6.0, 0.0, -2.5e-8, 1e300, static_cast<double>(0.1f)}) {
    const Value value = Value::number(x);
    EXPECT_EQ(value.as_double(), x);
    EXPECT_EQ(value.as_unsigned(), std::nullopt) << value.text();
  }
}

}  // namespace
}  // namespace monograph::json
