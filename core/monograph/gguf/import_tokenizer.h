// tokenizer.json and tokenizer_config.json of transformers out of the pairs of a GGUF file: the way
// back of tokenizer.h, for the same two kinds of BPE.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "monograph/gguf/file_header.h"
#include "monograph/text/json_document.h"

namespace monograph::gguf {

struct ImportedTokenizer {
  json::Value tokenizer, config;
  // generation_config.json, where a turn or a message ends with other tokens than a text.
  std::optional<json::Value> generation;
};

// Sentencepiece's merges are those that transformers makes of a sentencepiece model: every way to
// cut a token into two, by the score of the token. Unused tokens have no name. Throws Error, with
// `source` in front, for a key of the tokenizer that is not known, another kind, an unknown way to
// cut text into words, arrays of unequal length, a token twice, or a merge of what is no token.
ImportedTokenizer import_tokenizer(const FileHeader& header, std::string_view source);

}  // namespace monograph::gguf
