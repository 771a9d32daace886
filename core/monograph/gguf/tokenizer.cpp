#include "monograph/gguf/tokenizer.h"

#include <algorithm>

#include "monograph/base/error.h"
#include "monograph/gguf/vocabulary.h"
#include "monograph/text/utf8.h"
#include "monograph/weights/model_settings.h"

namespace monograph::gguf {
namespace {

using json::Kind;
using json::Value;
using text::in_quotes;

// The numbers of the tokens that llama.cpp knows by their role.
struct SpecialTokens {
  std::optional<std::uint32_t> bos, eos, pad, unknown;
  bool add_bos = false, add_eos = false;
};

class TokenizerReader {
 public:
  TokenizerReader(const TokenizerFiles& files, std::uint64_t size)
      : files_(files), vocabulary_(read_vocabulary(*files.tokenizer, size, files.source)) {}

  Tokenizer read() {
    read_special();
    const Value* fallback = present(present(files_.tokenizer, "model"), "byte_fallback");
    const bool sentencepiece = fallback != nullptr && fallback->as_bool().value_or(false);
    result_.tokens = vocabulary_.tokens.size();
    result_.model = sentencepiece ? "llama" : "gpt2";
    result_.metadata.add("tokenizer.ggml.model", result_.model);
    if (sentencepiece) {
      add_sentencepiece();
    } else {
      add_byte_level();
    }
    std::vector<std::int32_t> types;
    for (const TokenType type : vocabulary_.types) types.push_back(static_cast<std::int32_t>(type));
    result_.metadata.add("tokenizer.ggml.tokens", std::span<const std::string>(vocabulary_.tokens));
    result_.metadata.add("tokenizer.ggml.token_type", std::span<const std::int32_t>(types));
    add_special();
    add_chat_template();
    return std::move(result_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(files_.source + ": " + what);
  }

  // tokenizer_config.json names it, or config.json has its number.
  std::optional<std::uint32_t> special(const std::string& role) const {
    const Value* token = present(files_.tokenizer_config, role + "_token");
    if (token != nullptr && token->is(Kind::kObject)) token = present(token, "content");
    if (token != nullptr && token->as_string()) {
      return vocabulary_.id_of(*token->as_string(), files_.source + ": " + role + "_token");
    }
    const Value* number =
        files_.config == nullptr ? nullptr : find_setting(*files_.config, role + "_token_id");
    if (number != nullptr && number->is(Kind::kArray) && !number->items().empty()) {
      number = &number->items().front();
    }
    const std::optional<std::uint64_t> id =
        number == nullptr ? std::nullopt : number->as_unsigned();
    if (!id || *id >= vocabulary_.tokens.size()) return std::nullopt;
    return static_cast<std::uint32_t>(*id);
  }

  void read_special() {
    special_.bos = special("bos");
    special_.eos = special("eos");
    special_.pad = special("pad");
    const Value* unknown = present(present(files_.tokenizer, "model"), "unk_token");
    if (unknown != nullptr && unknown->as_string()) {
      special_.unknown = vocabulary_.id_of(*unknown->as_string(), files_.source);
    }
    // Without one llama.cpp would end at whatever token has the number 11 or 2.
    if (!special_.eos) fail("no eos_token is known: neither its name nor its number");
    for (const Value* step : steps_of(present(files_.tokenizer, "post_processor"), "processors")) {
      if (type_of(step) == "ByteLevel") continue;
      if (type_of(step) != "TemplateProcessing") {
        fail("post_processor " + in_quotes(type_of(step)) +
             ": known are ByteLevel and TemplateProcessing");
      }
      read_template(present(step, "single"));
    }
  }

  // [bos] text [eos], as llama.cpp can.
  void read_template(const Value* pieces) {
    bool text_seen = false;
    if (pieces == nullptr) return;
    for (const Value& piece : pieces->items()) {
      const Value* special = present(&piece, "SpecialToken");
      if (special == nullptr) {
        text_seen = true;
        continue;
      }
      const Value* name = present(special, "id");
      const auto id = vocabulary_.id_of(
          name == nullptr ? std::string_view() : name->as_string().value_or(""), files_.source);
      bool& added = text_seen ? special_.add_eos : special_.add_bos;
      if ((text_seen ? special_.eos : special_.bos) != id || added) {
        fail("post_processor puts " + in_quotes(vocabulary_.tokens[id]) +
             (text_seen ? " behind" : " in front of") +
             " the text, llama.cpp only one bos_token in front and one eos_token behind");
      }
      added = true;
    }
  }

  void add_byte_level() {
    result_.pre = pre_tokenizer_name(*files_.tokenizer, files_.source);
    result_.metadata.add("tokenizer.ggml.pre", result_.pre);
    std::vector<std::string> merges;
    merges.reserve(vocabulary_.merges.size());
    for (const auto& [left, right] : vocabulary_.merges) {
      const std::string &first = vocabulary_.tokens[left], &second = vocabulary_.tokens[right];
      if (first.find(' ') != std::string::npos || second.find(' ') != std::string::npos) {
        fail("merge of " + in_quotes(first) + " and " + in_quotes(second) +
             ": a blank separates the two in GGUF");
      }
      merges.emplace_back(first).append(" ").append(second);
    }
    result_.metadata.add("tokenizer.ggml.merges", std::span<const std::string>(merges));
  }

  void add_sentencepiece() {
    result_.pre = "default";
    const SentencePiece piece = as_sentencepiece(*files_.tokenizer, vocabulary_, files_.source);
    vocabulary_.ids.clear();  // the names of some tokens have changed
    result_.metadata.add("tokenizer.ggml.pre", result_.pre);
    result_.metadata.add("tokenizer.ggml.scores", std::span<const float>(piece.scores));
    result_.metadata.add("tokenizer.ggml.add_space_prefix", piece.blank_in_front);
    if (piece.first_only) {
      result_.notes.emplace_back(
          "llama.cpp puts a blank in front of text behind a special token too, transformers only "
          "at the begin");
    }
  }

  void add_special() {
    const auto add = [&](const std::string& key, std::optional<std::uint32_t> id) {
      if (id) result_.metadata.add("tokenizer.ggml." + key, *id);
    };
    // A model without a first token: llama.cpp would take one by its number.
    add("bos_token_id", special_.bos ? special_.bos : special_.eos);
    add("eos_token_id", special_.eos);
    add("unknown_token_id", special_.unknown);
    add("padding_token_id", special_.pad);
    result_.metadata.add("tokenizer.ggml.add_bos_token", special_.add_bos);
    result_.metadata.add("tokenizer.ggml.add_eos_token", special_.add_eos);
  }

  void add_chat_template() {
    std::optional<std::string> found = files_.chat_template;
    const Value* value = present(files_.tokenizer_config, "chat_template");
    if (!found && value != nullptr && value->as_string()) found = value->text();
    if (!found && value != nullptr && value->is(Kind::kArray)) {
      for (const Value& item : value->items()) {
        const Value *name = present(&item, "name"), *text = present(&item, "template");
        const bool chosen = name != nullptr && name->as_string() == "default";
        if (chosen && text != nullptr && text->as_string()) found = text->text();
      }
    }
    if (found) result_.metadata.add("tokenizer.chat_template", *found);
  }

  const TokenizerFiles& files_;
  Vocabulary vocabulary_;
  SpecialTokens special_;
  Tokenizer result_;
};

}  // namespace

Tokenizer read_tokenizer(const TokenizerFiles& files, std::uint64_t vocabulary) {
  return TokenizerReader(files, vocabulary).read();
}

}  // namespace monograph::gguf
