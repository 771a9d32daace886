// Sentencepiece's BPE out of a list of merges.
#include <array>
#include <cstdio>
#include <optional>
#include <unordered_set>

#include "monograph/base/error.h"
#include "monograph/gguf/vocabulary.h"
#include "monograph/text/utf8.h"

namespace monograph::gguf {
namespace {

using json::Value;
using text::in_quotes;

[[noreturn]] void fail(std::string_view source, const std::string& what) {
  throw Error(std::string(source) + ": " + what);
}

std::string_view text_of(const Value* object, std::string_view key) {
  const Value* value = present(object, key);
  return value == nullptr ? std::string_view() : value->as_string().value_or("");
}

bool is_false(const Value* object, std::string_view key) {
  const Value* value = present(object, key);
  return value != nullptr && !value->as_bool().value_or(true);
}

// Every blank becomes kBlank, with one in front or not.
void read_blanks(const Value& tokenizer, std::string_view source, SentencePiece& result) {
  bool replaced = false;
  for (const Value* step : steps_of(present(&tokenizer, "normalizer"), "normalizers")) {
    const std::string_view type = type_of(step);
    if (type == "Prepend" && text_of(step, "prepend") == kBlank) {
      result.blank_in_front = true;
    } else if (type == "Replace" && text_of(step, "content") == kBlank &&
               text_of(present(step, "pattern"), "String") == " ") {
      replaced = true;
    } else {
      fail(source, "normalizer " + in_quotes(json::dump_line(*step)) +
                       ": llama.cpp has none such for sentencepiece's BPE");
    }
  }
  for (const Value* step : steps_of(present(&tokenizer, "pre_tokenizer"), "pretokenizers")) {
    const std::string_view type = type_of(step), scheme = text_of(step, "prepend_scheme");
    if (type == "Metaspace" && text_of(step, "replacement") == kBlank && is_false(step, "split") &&
        !replaced) {
      replaced = true;
      result.blank_in_front = scheme != "never";
      result.first_only = scheme == "first";
    } else if (type == "Split" && replaced && text_of(present(step, "pattern"), "String") == " ") {
      // Gemma's: no blank is left that it could split at.
    } else {
      fail(source, "pre_tokenizer " + in_quotes(json::dump_line(*step)) +
                       ": llama.cpp has none such for sentencepiece's BPE");
    }
  }
  if (!replaced) fail(source, "nothing replaces blanks by U+2581, as llama.cpp does");
}

void mark_bytes(Vocabulary& vocabulary, std::string_view source) {
  for (unsigned byte = 0; byte < 256; ++byte) {
    std::array<char, 8> name{};
    std::snprintf(name.data(), name.size(), "<0x%02X>", byte);
    const auto found = vocabulary.ids.find(name.data());
    if (found != vocabulary.ids.end()) {
      vocabulary.types[found->second] = TokenType::kByte;
      continue;
    }
    const char itself = static_cast<char>(byte);  // Gemma's tab
    if (!vocabulary.ids.contains(std::string_view(&itself, 1))) {
      fail(source, "byte_fallback without a token " + in_quotes(name.data()));
    }
  }
}

std::size_t first_character(std::string_view text) {
  const std::size_t length = text::utf8_sequence_length(text);
  return length == 0 ? 1 : length;
}

using Pairs = std::unordered_set<std::uint64_t>;
std::uint64_t pair_key(std::uint64_t left, std::uint64_t right) { return left << 32 | right; }

// Whether llama.cpp can have it as a symbol, and its number if it is a token.
struct Symbol {
  bool possible = false;
  std::optional<std::uint32_t> id;
};
Symbol symbol_of(const Vocabulary& vocabulary, std::string_view text) {
  const auto found = vocabulary.ids.find(text);
  if (found != vocabulary.ids.end()) return {true, found->second};
  return {first_character(text) == text.size(), std::nullopt};
}

// Throws if two symbols make `token` in llama.cpp, but no merge does.
void check_pairs(const Vocabulary& vocabulary, std::uint32_t id, const Pairs& pairs,
                 std::string_view source) {
  const std::string_view token = vocabulary.tokens[id];
  for (std::size_t at = first_character(token); at < token.size();
       at += first_character(token.substr(at))) {
    const std::string_view left_text = token.substr(0, at), right_text = token.substr(at);
    const Symbol left = symbol_of(vocabulary, left_text), right = symbol_of(vocabulary, right_text);
    if (!left.possible || !right.possible) continue;
    if (left.id && right.id && pairs.contains(pair_key(*left.id, *right.id))) continue;
    fail(source, "no merge makes " + in_quotes(token) + " of " + in_quotes(left_text) + " and " +
                     in_quotes(right_text) +
                     ", but llama.cpp's sentencepiece would: not a tokenizer that it has");
  }
}

std::string with_blanks(std::string_view token) {
  std::string out;
  for (std::size_t at = 0; at < token.size();) {
    const bool blank = token.substr(at).starts_with(kBlank);
    out.push_back(blank ? ' ' : token[at]);
    at += blank ? kBlank.size() : 1;
  }
  return out;
}

std::vector<float> scores_of(const Vocabulary& vocabulary, std::string_view source) {
  std::vector<float> scores(vocabulary.tokens.size());
  Pairs pairs;
  float score = 0;
  for (std::size_t i = 0; i < vocabulary.merges.size(); ++i) {
    const std::uint32_t made = vocabulary.merged[i];
    pairs.insert(pair_key(vocabulary.merges[i].first, vocabulary.merges[i].second));
    if (i != 0 && vocabulary.merged[i - 1] == made) continue;
    if (scores[made] != 0) {
      fail(source, "merges of " + in_quotes(vocabulary.tokens[made]) +
                       " stand apart, but llama.cpp's sentencepiece has one score a token");
    }
    scores[made] = score -= 1;
  }
  for (std::uint32_t id = 0; id < vocabulary.tokens.size(); ++id) {
    if (vocabulary.types[id] == TokenType::kNormal) check_pairs(vocabulary, id, pairs, source);
  }
  return scores;
}

}  // namespace

SentencePiece as_sentencepiece(const Value& tokenizer, Vocabulary& vocabulary,
                               std::string_view source) {
  SentencePiece result;
  const Value* model = present(&tokenizer, "model");
  const Value* ignore = present(model, "ignore_merges");
  if (ignore != nullptr && ignore->as_bool().value_or(true)) {
    fail(source, "model.ignore_merges is set, which llama.cpp's sentencepiece does not have");
  }
  read_blanks(tokenizer, source, result);
  const std::string_view unknown = text_of(model, "unk_token");
  if (!unknown.empty()) {
    vocabulary.types[vocabulary.id_of(unknown, source)] = TokenType::kUnknown;
  }
  mark_bytes(vocabulary, source);
  result.scores = scores_of(vocabulary, source);
  // llama.cpp looks for these in the text before it replaces blanks.
  for (std::size_t id = 0; id < vocabulary.tokens.size(); ++id) {
    if (vocabulary.types[id] == TokenType::kUserDefined) {
      vocabulary.tokens[id] = with_blanks(vocabulary.tokens[id]);
    }
  }
  return result;
}

}  // namespace monograph::gguf
