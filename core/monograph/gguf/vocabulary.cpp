#include "monograph/gguf/vocabulary.h"

#include <algorithm>

#include "monograph/base/error.h"
#include "monograph/text/utf8.h"

namespace monograph::gguf {
namespace {

using json::Kind;
using json::Value;
using text::in_quotes;

[[noreturn]] void fail(std::string_view source, const std::string& what) {
  throw Error(std::string(source) + ": " + what);
}

class VocabularyReader {
 public:
  VocabularyReader(std::uint64_t size, std::string_view source) : source_(source) {
    if (size > kMostTokens) {
      fail(source_, "vocab_size is " + std::to_string(size) + ", wanted at most 2^24");
    }
    vocabulary_.tokens.resize(size);
    vocabulary_.types.resize(size, TokenType::kUnused);
    vocabulary_.ids.reserve(size);
  }

  void add_vocabulary(const Value* vocab) {
    if (vocab == nullptr || !vocab->is(Kind::kObject)) {
      fail(source_, "model.vocab must be an object");
    }
    for (const json::Member& member : vocab->members()) {
      place(member.key, member.value.as_unsigned(), TokenType::kNormal);
    }
  }

  void add_special(const Value* added) {
    if (added == nullptr) return;
    for (const Value& token : added->items()) {
      const Value* content = present(&token, "content");
      const Value* id = present(&token, "id");
      if (content == nullptr || id == nullptr || !content->as_string()) {
        fail(source_, "added_tokens: a token without content and id");
      }
      const std::string& name = content->text();
      for (const std::string_view key : {"single_word", "lstrip", "rstrip"}) {
        const Value* flag = present(&token, key);
        if (flag != nullptr && flag->as_bool().value_or(true)) {
          fail(source_, "added token " + in_quotes(name) + ": " + std::string(key) +
                            " is set, which llama.cpp does not have");
        }
      }
      const Value* special = present(&token, "special");
      const bool control = special != nullptr && special->as_bool().value_or(false);
      place(name, id->as_unsigned(), control ? TokenType::kControl : TokenType::kUserDefined);
    }
  }

  void add_merges(const Value* merges) {
    if (merges == nullptr || !merges->is(Kind::kArray)) {
      fail(source_, "model.merges must be an array");
    }
    std::string made;
    for (const Value& merge : merges->items()) {
      const auto [left, right] = pair_of(merge);
      made.assign(left).append(right);
      vocabulary_.merges.emplace_back(vocabulary_.id_of(left, source_),
                                      vocabulary_.id_of(right, source_));
      vocabulary_.merged.push_back(vocabulary_.id_of(made, source_));
    }
  }

  Vocabulary finish() {
    for (std::size_t i = 0; i < vocabulary_.tokens.size(); ++i) {
      if (vocabulary_.types[i] != TokenType::kUnused) continue;
      vocabulary_.tokens[i] = "[PAD" + std::to_string(i) + "]";
      if (vocabulary_.ids.contains(vocabulary_.tokens[i])) {
        fail(source_, "token " + in_quotes(vocabulary_.tokens[i]) + " is not token " +
                          std::to_string(i) + ", which has no name");
      }
    }
    return std::move(vocabulary_);
  }

 private:
  void place(const std::string& token, std::optional<std::uint64_t> id, TokenType type) {
    if (!id || *id >= vocabulary_.tokens.size()) {
      fail(source_, "token " + in_quotes(token) + " has number " +
                        (id ? std::to_string(*id) : std::string("?")) + ", the embedding has " +
                        std::to_string(vocabulary_.tokens.size()) + " rows");
    }
    if (token.empty()) fail(source_, "token " + std::to_string(*id) + " is empty");
    const bool known = vocabulary_.types[*id] != TokenType::kUnused;
    if (known && vocabulary_.tokens[*id] != token) {
      fail(source_, "tokens " + in_quotes(vocabulary_.tokens[*id]) + " and " + in_quotes(token) +
                        " have the same number " + std::to_string(*id));
    }
    vocabulary_.tokens[*id] = token;
    vocabulary_.types[*id] = type;
    const auto [entry, added] =
        vocabulary_.ids.emplace(vocabulary_.tokens[*id], static_cast<std::uint32_t>(*id));
    if (entry->second != *id) {
      fail(source_, "token " + in_quotes(token) + " has two numbers: " +
                        std::to_string(entry->second) + " and " + std::to_string(*id));
    }
  }

  // ["a", "b"], or "a b" in older files.
  std::pair<std::string_view, std::string_view> pair_of(const Value& merge) const {
    if (merge.is(Kind::kArray) && merge.items().size() == 2 && merge.items()[0].as_string() &&
        merge.items()[1].as_string()) {
      return {merge.items()[0].text(), merge.items()[1].text()};
    }
    const std::string_view text = merge.as_string().value_or("");
    const std::size_t blank = text.find(' ');
    if (blank == std::string_view::npos || text.find(' ', blank + 1) != std::string_view::npos) {
      fail(source_, "merge " + in_quotes(json::dump_line(merge)) + ": wanted two tokens");
    }
    return {text.substr(0, blank), text.substr(blank + 1)};
  }

  std::string_view source_;
  Vocabulary vocabulary_;
};

}  // namespace

const Value* present(const Value* object, std::string_view key) {
  const Value* value = object == nullptr ? nullptr : object->find(key);
  return value == nullptr || value->is(Kind::kNull) ? nullptr : value;
}

std::string_view type_of(const Value* object) {
  const Value* type = present(object, "type");
  return type == nullptr ? std::string_view() : type->as_string().value_or("");
}

std::vector<const Value*> steps_of(const Value* step, std::string_view key) {
  if (step == nullptr) return {};
  if (type_of(step) != "Sequence") return {step};
  std::vector<const Value*> steps;
  const Value* inner = present(step, key);
  if (inner == nullptr) return steps;
  for (const Value& item : inner->items()) steps.push_back(&item);
  return steps;
}

std::uint32_t Vocabulary::id_of(std::string_view token, std::string_view what) const {
  const auto found = ids.find(token);
  if (found == ids.end()) fail(what, "token " + in_quotes(token) + " is not in the vocabulary");
  return found->second;
}

Vocabulary read_vocabulary(const Value& tokenizer, std::uint64_t size, std::string_view source) {
  const Value* model = present(&tokenizer, "model");
  if (type_of(model) != "BPE") {
    fail(source, "model.type is " + in_quotes(type_of(model)) + ", export to GGUF knows \"BPE\"");
  }
  for (const std::string_view key :
       {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
    const Value* value = present(model, key);
    if (value != nullptr && value->as_string() != "" && value->as_double() != 0) {
      fail(source, "model." + std::string(key) + " is " + in_quotes(json::dump_line(*value)) +
                       ", which llama.cpp does not have");
    }
  }
  VocabularyReader reader(size, source);
  reader.add_vocabulary(present(model, "vocab"));
  reader.add_special(present(&tokenizer, "added_tokens"));
  reader.add_merges(present(model, "merges"));
  return reader.finish();
}

}  // namespace monograph::gguf
