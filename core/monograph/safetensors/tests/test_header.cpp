// The header parser: what it accepts, and every hostile case by name.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "monograph/files/tests/temporary_folder.h"
#include "monograph/safetensors/checkpoint.h"
#include "monograph/safetensors/header.h"
#include "monograph/safetensors/tests/hostile_files.h"

namespace monograph::safetensors {
namespace {

using namespace files;

Header parse(const std::string& json, std::size_t data_bytes) {
  const std::string file = file_bytes(json, data_bytes);
  return parse_header({reinterpret_cast<const std::uint8_t*>(file.data()), file.size()},
                      file.size(), "test");
}

TEST(SafetensorsHeader, AcceptsEveryDType) {
  for (const StoredDTypeInfo& info : kStoredDTypes) {
    const std::size_t bytes = 4 * info.bits / 8;  // 4 elements: whole bytes for 4 and 6 bits too
    const Header header =
        parse(R"({"x":{"dtype":")" + std::string(info.name) +
                  R"(","shape":[2,2],"data_offsets":[0,)" + std::to_string(bytes) + "]}}",
              bytes);
    const TensorEntry* entry = header.find("x");
    ASSERT_NE(entry, nullptr);
    EXPECT_EQ(name_of(entry->dtype), info.name);
    EXPECT_EQ(entry->size_bytes, bytes);
    EXPECT_EQ(entry->elements, 4u);
    EXPECT_EQ(entry->shape, (std::vector<std::uint64_t>{2, 2}));
    EXPECT_EQ(entry->offset_bytes, header.data_offset_bytes);
  }
}

TEST(SafetensorsHeader, AcceptsScalarsAndEmptyTensorsInAnyOrder) {
  const Header header = parse(R"({"late":{"data_offsets":[4,8],"dtype":"F32","shape":[]},)"
                              R"("nothing":{"shape":[3,0],"data_offsets":[4,4],"dtype":"F64"},)"
                              R"("early":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                              R"("end":{"dtype":"U8","shape":[0],"data_offsets":[8,8]}})",
                              8);
  ASSERT_EQ(header.tensors.size(), 4u);
  EXPECT_EQ(header.tensors[0].name, "early");
  EXPECT_EQ(header.tensors[1].name, "nothing");
  EXPECT_EQ(header.tensors[2].name, "late");
  EXPECT_EQ(header.tensors[3].name, "end");
  EXPECT_EQ(header.find("late")->elements, 1u);
  EXPECT_EQ(header.find("nothing")->elements, 0u);
  EXPECT_EQ(header.find("absent"), nullptr);
}

TEST(SafetensorsHeader, AcceptsBlanksAroundTheObject) {
  EXPECT_TRUE(parse(" \t\r\n{ \t\r\n} \t\r\n", 0).tensors.empty());
}

TEST(SafetensorsHeader, DecodesEscapesInNamesAndMetadata) {
  const Header header =
      parse(R"({"__metadata__":{"a\"\\\/\b\f\n\r\t":"\u00e9\uD834\uDD1E\u0000\u20ac","plain":"é"},)"
            R"("\u0078\/y":{"\u0064type":"U\u0038","shape":[1],"data_offsets":[0,1]}})",
            1);
  EXPECT_NE(header.find("x/y"), nullptr);
  EXPECT_EQ(header.metadata.at("a\"\\/\b\f\n\r\t"),
            std::string("\xc3\xa9\xf0\x9d\x84\x9e\0\xe2\x82\xac", 10));
  EXPECT_EQ(header.metadata.at("plain"), "\xc3\xa9");
}

TEST(SafetensorsHeader, KeepsViewsOfDecodedStringsWhenMoreBlocksAreNeeded) {
  std::string json = "{\"__metadata__\":{";
  for (int i = 0; i < 3000; ++i) {
    json += "\"\\t" + std::to_string(i) + std::string(100, 'k') + "\":\"\\n" + std::to_string(i) +
            "\",";
  }
  json.back() = '}';
  const Header header = parse(json + "}", 0);
  ASSERT_EQ(header.metadata.size(), 3000u);
  EXPECT_EQ(header.metadata.at("\t2999" + std::string(100, 'k')), "\n2999");
}

TEST(SafetensorsHeader, AcceptsRank64AndTheLargestNumbers) {
  std::string shape = "[0";
  for (int i = 1; i < 64; ++i) shape += ",1";
  EXPECT_EQ(parse(R"({"a":{"dtype":"U8","shape":)" + shape + R"(],"data_offsets":[0,0]}})", 0)
                .tensors[0]
                .shape.size(),
            64u);
  // 2^58 - 1 doubles in one dimension: 64 bits each just fit.
  const std::string file = file_bytes(
      R"({"a":{"dtype":"F64","shape":[288230376151711743],"data_offsets":[0,2305843009213693944]}})",
      0);
  const Header header =
      parse_header({reinterpret_cast<const std::uint8_t*>(file.data()), file.size()},
                   file.size() + 2305843009213693944u, "test");
  EXPECT_EQ(header.tensors[0].elements, 288230376151711743u);
}

TEST(SafetensorsHeader, NeedsOnlyTheBytesOfTheHeader) {
  const std::string file =
      file_bytes(R"({"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}})", 0);
  const std::span<const std::uint8_t> bytes(reinterpret_cast<const std::uint8_t*>(file.data()),
                                            file.size());
  EXPECT_EQ(parse_header(bytes, file.size() + 9, "test").tensors.size(), 1u);
  EXPECT_THROW(parse_header(bytes.first(20), file.size() + 9, "test"), Error);
}

class HostileHeader : public testing::TestWithParam<HostileCase> {};

TEST_P(HostileHeader, IsRefusedByItsRule) {
  const HostileCase& hostile = GetParam();
  const TemporaryFolder folder;
  make_case(hostile, folder.path());
  const std::filesystem::path path = folder / hostile.open;
  const std::string error = error_of([&] { Checkpoint::open(path); });
  EXPECT_NE(error.find(hostile.rule), std::string::npos) << error;
  EXPECT_TRUE(error.starts_with(path.string() + ": ")) << error;
  EXPECT_LT(error.size(), path.string().size() + 400) << error;
  // A control character of the file must never reach a terminal.
  for (const char c : error) EXPECT_GE(static_cast<unsigned char>(c), 0x20) << error;
}

std::string name_of_case(const testing::TestParamInfo<HostileCase>& info) {
  return info.param.name;
}

INSTANTIATE_TEST_SUITE_P(Safetensors, HostileHeader, testing::ValuesIn(hostile_headers()),
                         name_of_case);

TEST(SafetensorsHeader, HostileCasesAreManyAndHaveTheirOwnNames) {
  std::set<std::string> names;
  std::size_t count = 0;
  for (const auto& cases : {hostile_headers(), hostile_indexes()}) {
    for (const HostileCase& hostile : cases) names.insert(hostile.name);
    count += cases.size();
  }
  EXPECT_EQ(names.size(), count);
  EXPECT_GE(count, 120u);
}

// Every prefix of a good file is refused; so is every change of one byte of the JSON, or the result
// is still valid JSON and describes the same number of bytes.
TEST(SafetensorsHeader, RefusesEveryPrefix) {
  const std::string file = file_bytes(
      R"({"__metadata__":{"k":"v"},"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]}} )", 4);
  for (std::size_t size = 0; size < file.size(); ++size) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(file.data());
    EXPECT_THROW(parse_header({bytes, size}, size, "test"), Error) << size;
  }
}

TEST(SafetensorsHeader, WhatItAcceptsALibraryAcceptsToo) {
  const std::string json =
      R"({"__metadata__":{"k":"v\n"},"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]}} )";
  int accepted = 0;
  for (std::size_t at = 0; at < json.size(); ++at) {
    for (int value = 0; value < 256; ++value) {
      std::string changed = json;
      changed[at] = static_cast<char>(value);
      try {
        const Header header = parse(changed, 4);
        EXPECT_EQ(header.tensors.size(), 1u);
        EXPECT_TRUE(nlohmann::json::accept(changed)) << changed;
        ++accepted;
      } catch (const Error&) {
      }
    }
  }
  EXPECT_GT(accepted, 300);
}

}  // namespace
}  // namespace monograph::safetensors
