#include "monograph/gguf/import_vocabulary.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>

#include "monograph/base/error.h"
#include "monograph/text/utf8.h"

namespace monograph::gguf {
namespace {

using text::in_quotes;

// Cutting is quadratic in it; Gemma's longest has 93.
constexpr std::size_t kMostPieceBytes = 512;
// Gemma 3 has half a million.
constexpr std::size_t kMostMerges = std::size_t{1} << 22;

[[noreturn]] void fail(std::string_view source, const std::string& what) {
  throw Error(std::string(source) + ": " + what);
}

const PairView& array_of(const FileHeader& header, const std::string& key, ValueType element,
                         std::string_view source) {
  const PairView* pair = header.find("tokenizer.ggml." + key);
  if (pair == nullptr || pair->type != ValueType::kArray || pair->element != element) {
    fail(source, "tokenizer.ggml." + key + " is " + (pair == nullptr ? "missing" : "another type") +
                     ", wanted an array of " + std::string(name_of(element)));
  }
  return *pair;
}

std::vector<std::string_view> strings_of(const PairView& array) {
  std::vector<std::string_view> found;
  found.reserve(array.count);
  std::size_t place = 0;
  for (std::uint64_t i = 0; i < array.count; ++i) {
    std::uint64_t length;
    std::memcpy(&length, array.bytes.data() + place, sizeof length);
    place += sizeof length;
    found.emplace_back(reinterpret_cast<const char*>(array.bytes.data()) + place, length);
    place += length;
  }
  return found;
}

template <class T>
std::vector<T> numbers_of(const PairView& array) {
  std::vector<T> found(array.count);
  if (!found.empty()) std::memcpy(found.data(), array.bytes.data(), array.count * sizeof(T));
  return found;
}

// llama.cpp has real blanks in the tokens that it looks for first.
std::string with_sentencepiece_blanks(std::string_view token) {
  std::string out;
  for (const char c : token) out.append(c == ' ' ? kBlank : std::string_view(&c, 1));
  return out;
}

std::size_t characters_of(std::string_view text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

}  // namespace

ImportedVocabulary import_vocabulary(const FileHeader& header, std::string_view source,
                                     bool sentencepiece) {
  const PairView& tokens = array_of(header, "tokens", ValueType::kString, source);
  const PairView& types = array_of(header, "token_type", ValueType::kI32, source);
  if (tokens.count == 0 || tokens.count > kMostTokens || types.count != tokens.count) {
    fail(source, "tokenizer.ggml: " + std::to_string(tokens.count) + " tokens and " +
                     std::to_string(types.count) + " types, wanted as many, at most 2^24");
  }
  // llama.cpp wants them equal; a token without a row would be read from behind the table.
  const TensorInfo* table = header.find_tensor("token_embd.weight");
  if (table != nullptr && table->shape.front() != tokens.count) {
    fail(source, "tokenizer.ggml.tokens has " + std::to_string(tokens.count) +
                     " tokens, token_embd.weight " + std::to_string(table->shape.front()) +
                     " rows, wanted as many");
  }
  ImportedVocabulary vocabulary;
  const std::vector<std::string_view> names = strings_of(tokens);
  const std::vector<std::int32_t> numbers = numbers_of<std::int32_t>(types);
  for (std::size_t id = 0; id < names.size(); ++id) {
    if (numbers[id] < 1 || numbers[id] > 6) {
      fail(source, "tokenizer.ggml.token_type of token " + std::to_string(id) + " is " +
                       std::to_string(numbers[id]) + ", wanted 1 to 6");
    }
    const auto type = static_cast<TokenType>(numbers[id]);
    vocabulary.types.push_back(type);
    vocabulary.tokens.push_back(sentencepiece && type == TokenType::kUserDefined
                                    ? with_sentencepiece_blanks(names[id])
                                    : std::string(names[id]));
  }
  vocabulary.ids.reserve(names.size());
  for (std::size_t id = 0; id < names.size(); ++id) {
    if (!vocabulary.is_used(id)) continue;
    const std::string& token = vocabulary.tokens[id];
    if (token.empty() || !text::is_utf8(token)) {
      fail(source,
           "token " + std::to_string(id) + " is " + in_quotes(token) + ", wanted a name in UTF-8");
    }
    if (!vocabulary.ids.emplace(token, static_cast<std::uint32_t>(id)).second) {
      fail(source, "token " + in_quotes(token) + " is there twice");
    }
  }
  if (!sentencepiece) return vocabulary;
  const PairView& scores = array_of(header, "scores", ValueType::kF32, source);
  if (scores.count != tokens.count) {
    fail(source, "tokenizer.ggml.scores has " + std::to_string(scores.count) + " for " +
                     std::to_string(tokens.count) + " tokens");
  }
  vocabulary.scores = numbers_of<float>(scores);
  return vocabulary;
}

std::vector<Merge> stored_merges(const FileHeader& header, const ImportedVocabulary& vocabulary,
                                 std::string_view source) {
  std::vector<Merge> merges;
  for (const std::string_view text :
       strings_of(array_of(header, "merges", ValueType::kString, source))) {
    const std::size_t blank = text.find(' ', 1);  // a token may begin with one
    const std::string_view left = text.substr(0, blank);
    const std::string_view right =
        blank == std::string_view::npos ? std::string_view() : text.substr(blank + 1);
    const std::string made = std::string(left) + std::string(right);
    if (right.empty() || !vocabulary.ids.contains(left) || !vocabulary.ids.contains(right) ||
        !vocabulary.ids.contains(made)) {
      fail(source, "merge " + in_quotes(text) + ": wanted two tokens that make a third");
    }
    merges.emplace_back(left, right);
  }
  return merges;
}

std::vector<Merge> merges_by_score(const ImportedVocabulary& vocabulary, std::string_view source) {
  struct Cut {
    Merge merge;
    float score;
    std::uint32_t token, left, right;
    std::size_t left_length, right_length;
  };
  std::vector<Cut> cuts;
  for (std::uint32_t id = 0; id < vocabulary.tokens.size(); ++id) {
    if (vocabulary.types[id] != TokenType::kNormal &&
        vocabulary.types[id] != TokenType::kUserDefined) {
      continue;
    }
    const std::string_view token = vocabulary.tokens[id];
    if (token.size() > kMostPieceBytes || !std::isfinite(vocabulary.scores[id])) {
      fail(source, "token " + in_quotes(token) + " of " + std::to_string(token.size()) +
                       " bytes and score " + std::to_string(vocabulary.scores[id]) +
                       ", wanted at most 512 bytes and a finite score");
    }
    for (std::size_t at = 1; at < token.size(); ++at) {
      if ((token[at] & 0xc0) == 0x80) continue;  // inside a character
      const auto left = vocabulary.ids.find(token.substr(0, at));
      if (left == vocabulary.ids.end()) continue;
      const auto right = vocabulary.ids.find(token.substr(at));
      if (right == vocabulary.ids.end()) continue;
      if (cuts.size() == kMostMerges) {
        fail(source, "tokens can be cut in two in more than " + std::to_string(kMostMerges) +
                         " ways, at most as many merges are made");
      }
      cuts.push_back({{left->first, right->first},
                      vocabulary.scores[id],
                      id,
                      left->second,
                      right->second,
                      characters_of(left->first),
                      characters_of(right->first)});
    }
  }
  std::sort(cuts.begin(), cuts.end(), [](const Cut& a, const Cut& b) {
    return std::tuple(-a.score, b.left_length, b.right_length, a.token, a.left, a.right) <
           std::tuple(-b.score, a.left_length, a.right_length, b.token, b.left, b.right);
  });
  std::vector<Merge> merges;
  merges.reserve(cuts.size());
  for (const Cut& cut : cuts) merges.push_back(cut.merge);
  return merges;
}

}  // namespace monograph::gguf
