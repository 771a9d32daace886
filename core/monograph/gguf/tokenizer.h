// The tokenizer of a model folder as llama.cpp has it: one of its two kinds of BPE, or a refusal.
//   "gpt2"    byte-level BPE with merges, and the name of a way to cut text into words, told by the
//             regular expression of tokenizer.json
//   "llama"   sentencepiece's BPE: llama.cpp merges any two neighbours that make a token, the token
//             of the highest score first. A list of merges says the same if it has every pair that
//             makes a token, and has the pairs of one token together; else it is refused.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/gguf/file_writer.h"
#include "monograph/text/json_document.h"

namespace monograph::gguf {

// For json::parse of tokenizer.json: Gemma 3 has 262,144 tokens and 514,906 merges in 33 MB.
inline constexpr json::Limits kTokenizerLimits = {128'000'000, 4'000'000};

struct TokenizerFiles {
  const json::Value* tokenizer = nullptr;         // tokenizer.json
  const json::Value* tokenizer_config = nullptr;  // may be null
  const json::Value* config = nullptr;            // for the numbers of special tokens
  std::optional<std::string> chat_template;       // chat_template.jinja, if there is one
  std::string source;                             // begins every message: the path
};

struct Tokenizer {
  std::string_view model;  // "gpt2" or "llama"
  std::string_view pre;    // how text is cut into words; "default" for "llama"
  std::uint64_t tokens = 0;
  Metadata metadata;  // the keys "tokenizer.*"
  std::vector<std::string> notes;
};

// With names for `vocabulary` tokens: those that the embedding has beyond the tokenizer's are
// unused. Throws Error with what cannot be carried.
Tokenizer read_tokenizer(const TokenizerFiles& files, std::uint64_t vocabulary);

}  // namespace monograph::gguf
