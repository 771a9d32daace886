// tokenizer.json taken apart: tokens by number, merges as pairs. A step of read_tokenizer.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "monograph/text/json_document.h"

namespace monograph::gguf {

inline constexpr std::uint64_t kMostTokens = 1 << 24;  // an fp32 number tells their order
inline constexpr std::string_view kBlank = "\u2581";   // sentencepiece's

// The numbers of llama.cpp.
enum class TokenType : std::int32_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6,
};

struct Vocabulary {
  std::vector<std::string> tokens;  // by number; as in tokenizer.json
  std::vector<TokenType> types;
  std::unordered_map<std::string_view, std::uint32_t> ids;  // of the tokens of tokenizer.json
  std::vector<std::pair<std::uint32_t, std::uint32_t>> merges;
  std::vector<std::uint32_t> merged;  // what each pair makes

  // The number of a token that must be there. Throws Error.
  std::uint32_t id_of(std::string_view token, std::string_view what) const;
};

// `model` of type BPE. Unused tokens fill up to `size`; more than that are refused. Settings of BPE
// that llama.cpp does not have are refused.
Vocabulary read_vocabulary(const json::Value& tokenizer, std::uint64_t size,
                           std::string_view source);

// A member of an object that is neither absent nor null, else nullptr; and the name under "type".
const json::Value* present(const json::Value* object, std::string_view key);
std::string_view type_of(const json::Value* object);

// The parts of a normalizer, pre-tokenizer or processor: those of a Sequence under `key`, else
// itself; none of null.
std::vector<const json::Value*> steps_of(const json::Value* step, std::string_view key);

// The name of llama.cpp's way to cut text into words, as the pre-tokenizer of a byte-level BPE
// does. Throws Error if there is none.
std::string_view pre_tokenizer_name(const json::Value& tokenizer, std::string_view source);

// The way back, or nothing if the name is not known.
struct PreTokenizer {
  json::Value normalizer, words;  // of tokenizer.json
  bool ignore_merges = false;
  bool begins = false;  // llama.cpp puts the first token in front unless the file says no
};
std::optional<PreTokenizer> pre_tokenizer_named(std::string_view name);
std::string pre_tokenizer_names();

// Sentencepiece's: whether a blank is put in front of the text, told by normalizer and
// pre-tokenizer, and the score of each token. Types of single bytes are set and blanks of
// user-defined tokens become real ones.
struct SentencePiece {
  bool blank_in_front = false;
  bool first_only = false;  // not behind special tokens
  std::vector<float> scores;
};
SentencePiece as_sentencepiece(const json::Value& tokenizer, Vocabulary& vocabulary,
                               std::string_view source);

}  // namespace monograph::gguf
