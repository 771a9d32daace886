// libFuzzer: any bytes as tokenizer.json. What is carried has a name and a type for every token,
// and every merge is of tokens of the vocabulary.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "monograph/base/error.h"
#include "monograph/gguf/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace monograph;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  static const json::Value config = json::parse(R"({"eos_token_id": 0})", "config");
  constexpr std::uint64_t kTokens = 300;
  try {
    const json::Value tokenizer = json::parse(text, "fuzz", gguf::kTokenizerLimits);
    gguf::TokenizerFiles files;
    files.tokenizer = &tokenizer;
    files.tokenizer_config = &tokenizer;
    files.config = &config;
    files.source = "fuzz";
    const gguf::Tokenizer read = gguf::read_tokenizer(files, kTokens);
    if (read.tokens != kTokens || read.metadata.count() < 6) std::abort();
  } catch (const Error&) {
  }
  return 0;
}
