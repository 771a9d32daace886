// A small file, whole and with one thing wrong at a time.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>

#include "monograph/base/error.h"
#include "monograph/gguf/file_header.h"

namespace monograph::gguf {
namespace {

template <class T>
std::string number(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

std::string text(const std::string& value) { return number<std::uint64_t>(value.size()) + value; }

struct File {
  std::string magic = "GGUF";
  std::uint32_t version = 3;
  std::uint64_t tensors = 2, pairs = 3;
  std::string pair_bytes = text("general.architecture") + number(8u) + text("llama") +
                           text("llama.block_count") + number(4u) + number(7u) +
                           text("tokenizer.ggml.tokens") + number(9u) + number(8u) +
                           number<std::uint64_t>(2) + text("a") + text("");
  std::string first = text("token_embd.weight") + number(2u) + number<std::uint64_t>(64) +
                      number<std::uint64_t>(3) + number(8u) + number<std::uint64_t>(0);
  std::string second = text("output_norm.weight") + number(1u) + number<std::uint64_t>(5) +
                       number(0u) + number<std::uint64_t>(224);
  std::uint64_t data = 224 + 32;

  std::string bytes() const {
    std::string all =
        magic + number(version) + number(tensors) + number(pairs) + pair_bytes + first + second;
    all.resize((all.size() + 31) / 32 * 32);
    return all + std::string(data, '\0');
  }
};

FileHeader parse(const std::string& bytes) {
  return parse_file_header({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()},
                           "it.gguf");
}

TEST(GgufHeader, ReadsWhatIsThere) {
  const std::string bytes = File().bytes();
  const FileHeader header = parse(bytes);
  EXPECT_EQ(header.architecture(), "llama");
  EXPECT_EQ(header.find("llama.block_count")->whole(), 7u);
  EXPECT_EQ(header.find("llama.block_count")->number(), 7.0);
  EXPECT_EQ(header.find("llama.block_count")->text(), std::nullopt);
  EXPECT_EQ(header.find("tokenizer.ggml.tokens")->count, 2u);
  EXPECT_EQ(header.find("tokenizer.ggml.tokens")->bytes.size(), 17u);
  EXPECT_EQ(header.find("nothing"), nullptr);
  ASSERT_EQ(header.tensors.size(), 2u);
  EXPECT_EQ(header.tensors[0].shape, (std::vector<std::uint64_t>{3, 64}));
  EXPECT_EQ(header.tensors[0].size_bytes, 3u * 2 * 34);
  EXPECT_EQ(header.find_tensor("output_norm.weight")->offset_bytes, 224u);
  EXPECT_EQ(header.data_offset_bytes % 32, 0u);
}

TEST(GgufHeader, NoShorterFileIsAccepted) {
  const std::string bytes = File().bytes();
  for (std::size_t size = 0; size + 12 < bytes.size(); ++size) {  // the last 12 bytes are padding
    EXPECT_THROW(parse(bytes.substr(0, size)), Error) << size;
  }
  EXPECT_NO_THROW(parse(bytes.substr(0, bytes.size() - 12)));
}

TEST(GgufHeader, OneThingWrongIsNamed) {
  struct Case {
    const char* message;
    std::function<void(File&)> change;
  };
  const Case cases[] = {
      {"other bytes than", [](File& f) { f.magic = "GGUX"; }},
      {"version 1, wanted 2 or 3", [](File& f) { f.version = 1; }},
      {"big endian", [](File& f) { f.version = 3u << 24; }},
      {"tensors and", [](File& f) { f.tensors = 1u << 30; }},
      {"tensors and", [](File& f) { f.pairs = ~std::uint64_t{0}; }},
      {"is there twice",
       [](File& f) {
         f.pair_bytes += text("llama.block_count") + number(4u) + number(7u);
         f.pairs = 4;
       }},
      {"type 13 of a value",
       [](File& f) {
         f.pair_bytes += text("x") + number(13u);
         f.pairs = 4;
       }},
      {"array of arrays",
       [](File& f) {
         f.pair_bytes += text("x") + number(9u) + number(9u) + number<std::uint64_t>(0);
         f.pairs = 4;
       }},
      {"values of at least 4 bytes",
       [](File& f) {
         f.pair_bytes += text("x") + number(9u) + number(6u) + number<std::uint64_t>(1u << 30);
         f.pairs = 4;
       }},
      {"no UTF-8",
       [](File& f) {
         f.pair_bytes += text("\xff") + number(4u) + number(7u);
         f.pairs = 4;
       }},
      {"general.alignment is 48",
       [](File& f) {
         f.pair_bytes += text("general.alignment") + number(4u) + number(48u);
         f.pairs = 4;
       }},
      {"type 16 (iq2_xxs) is not read",
       [](File& f) { std::memcpy(&f.first[8 + 17 + 20], "\x10", 1); }},
      {"0 dimensions", [](File& f) { std::memcpy(&f.first[8 + 17], "\0", 1); }},
      {"is 0 or makes too many", [](File& f) { std::memcpy(&f.first[8 + 17 + 4], "\0", 1); }},
      {"multiple of 32", [](File& f) { std::memcpy(&f.first[8 + 17 + 4], "\x41", 1); }},
      {"wanted 0, where", [](File& f) { std::memcpy(&f.first[8 + 17 + 24], "\x20", 1); }},
      {"is there twice", [](File& f) { f.second.replace(0, 26, text("token_embd.weight")); }},
      {"bytes long, at most 63",
       [](File& f) { f.second.replace(0, 26, text(std::string(64, 'x'))); }},
      {"the file has", [](File& f) { f.data = 224; }},
      {"behind the last tensor", [](File& f) { f.data = 224 + 64; }},
  };
  for (const Case& one : cases) {
    File file;
    one.change(file);
    try {
      parse(file.bytes());
      ADD_FAILURE() << "accepted: " << one.message;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(one.message), std::string::npos) << error.what();
      EXPECT_EQ(std::string(error.what()).find("it.gguf: "), 0u) << error.what();
    }
  }
}

}  // namespace
}  // namespace monograph::gguf
