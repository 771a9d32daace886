// The tokens of a GGUF file. A step of import_tokenizer.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "monograph/gguf/file_header.h"
#include "monograph/gguf/vocabulary.h"

namespace monograph::gguf {

struct ImportedVocabulary {
  std::vector<std::string> tokens;  // as in tokenizer.json
  std::vector<TokenType> types;
  std::unordered_map<std::string_view, std::uint32_t> ids;  // of those that are used
  std::vector<float> scores;                                // sentencepiece's, else empty

  bool is_used(std::size_t id) const { return types[id] != TokenType::kUnused; }
};
ImportedVocabulary import_vocabulary(const FileHeader& header, std::string_view source,
                                     bool sentencepiece);

using Merge = std::pair<std::string_view, std::string_view>;
// The file's own, views of it.
std::vector<Merge> stored_merges(const FileHeader& header, const ImportedVocabulary& vocabulary,
                                 std::string_view source);
// Every way to cut a token in two, the best score first; of one score the longest begin.
std::vector<Merge> merges_by_score(const ImportedVocabulary& vocabulary, std::string_view source);

}  // namespace monograph::gguf
