#include "monograph/gguf/import_tokenizer.h"

#include <algorithm>
#include <array>

#include "monograph/base/error.h"
#include "monograph/gguf/import_vocabulary.h"
#include "monograph/text/utf8.h"

namespace monograph::gguf {
namespace {

using json::Value;
using text::in_quotes;

// Keys that are read here and in import_vocabulary.cpp, and those that transformers has no use for:
// tokens of a text with a hole, the number of types, a copy of the producer's tokenizer.json.
constexpr std::array<std::string_view, 32> kKnown = {
    "ggml.model",
    "ggml.pre",
    "ggml.tokens",
    "ggml.token_type",
    "ggml.token_type_count",
    "ggml.scores",
    "ggml.merges",
    "ggml.bos_token_id",
    "ggml.eos_token_id",
    "ggml.eot_token_id",
    "ggml.eom_token_id",
    "ggml.unknown_token_id",
    "ggml.padding_token_id",
    "ggml.add_bos_token",
    "ggml.add_eos_token",
    "ggml.add_sep_token",
    "ggml.add_space_prefix",
    "ggml.remove_extra_whitespaces",
    "ggml.seperator_token_id",
    "ggml.cls_token_id",
    "ggml.mask_token_id",
    "ggml.prefix_token_id",
    "ggml.suffix_token_id",
    "ggml.middle_token_id",
    "ggml.fim_pre_token_id",
    "ggml.fim_suf_token_id",
    "ggml.fim_mid_token_id",
    "ggml.fim_pad_token_id",
    "ggml.fim_rep_token_id",
    "ggml.fim_sep_token_id",
    "chat_template",
    "huggingface.json",
};

Value step(std::string_view type) {
  Value value;
  value.set("type", Value::string(type));
  return value;
}

Value sequence(std::string_view key, std::vector<Value> steps) {
  Value value = step("Sequence");
  Value& list = value.set(key, Value::array());
  for (Value& one : steps) list.append(std::move(one));
  return value;
}

Value replace(std::string_view from, std::string_view to) {
  Value value = step("Replace");
  value.set("pattern", Value::object()).set("String", Value::string(from));
  value.set("content", Value::string(to));
  return value;
}

Value number(std::uint64_t value) { return Value::number(static_cast<std::int64_t>(value)); }

class Importer {
 public:
  Importer(const FileHeader& header, std::string_view source) : header_(header), source_(source) {}

  ImportedTokenizer make() {
    const PairView* model = header_.find("tokenizer.ggml.model");
    const std::string_view kind = model == nullptr ? "" : model->text().value_or("");
    if (kind != "gpt2" && kind != "llama") {
      fail("tokenizer.ggml.model is " + in_quotes(kind) + ", known are gpt2, llama");
    }
    check_keys();
    pieces_ = kind == "llama";
    vocabulary_ = import_vocabulary(header_, source_, pieces_);
    Value tokenizer;
    tokenizer.set("version", Value::string("1.0"));
    tokenizer.set("truncation", Value());
    tokenizer.set("padding", Value());
    tokenizer.set("added_tokens", added_tokens());
    if (pieces_) {
      add_pieces(tokenizer);
    } else {
      add_byte_level(tokenizer);
    }
    return {std::move(tokenizer), config(), generation()};
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(std::string(source_) + ": " + what);
  }

  const PairView* find(const std::string& key) const {
    return header_.find("tokenizer.ggml." + key);
  }

  bool flag(const std::string& key, bool otherwise) const {
    const PairView* pair = find(key);
    if (pair == nullptr) return otherwise;
    if (pair->type != ValueType::kBool) fail("tokenizer.ggml." + key + ": wanted a bool");
    return pair->bytes[0] != 0;
  }

  void check_keys() const {
    constexpr std::string_view kBegin = "tokenizer.";
    for (const PairView& pair : header_.pairs) {
      if (!pair.key.starts_with(kBegin)) continue;
      const std::string_view rest = pair.key.substr(kBegin.size());
      if (std::find(kKnown.begin(), kKnown.end(), rest) == kKnown.end()) {
        fail("key " + in_quotes(pair.key) +
             ": nothing in a tokenizer of transformers is known for it");
      }
    }
    if (flag("add_sep_token", false)) {
      fail("tokenizer.ggml.add_sep_token is set, which no such tokenizer of transformers has");
    }
  }

  // The name of the token whose number the file gives.
  std::optional<std::uint32_t> special(const std::string& role) const {
    const PairView* pair = find(role + "_token_id");
    if (pair == nullptr) return std::nullopt;
    const std::optional<std::uint64_t> id = pair->whole();
    if (!id || *id >= vocabulary_.tokens.size() || !vocabulary_.is_used(*id)) {
      fail("tokenizer.ggml." + role + "_token_id is no token, of " +
           std::to_string(vocabulary_.tokens.size()));
    }
    return static_cast<std::uint32_t>(*id);
  }

  Value added_tokens() const {
    Value list = Value::array();
    for (std::size_t id = 0; id < vocabulary_.tokens.size(); ++id) {
      const TokenType type = vocabulary_.types[id];
      const bool control = type == TokenType::kControl || type == TokenType::kUnknown;
      if (!control && type != TokenType::kUserDefined) continue;
      Value& token = list.append(Value::object());
      token.set("id", number(id));
      token.set("content", Value::string(vocabulary_.tokens[id]));
      for (const char* key : {"single_word", "lstrip", "rstrip", "normalized"}) {
        token.set(key, Value::boolean(false));
      }
      token.set("special", Value::boolean(control));
    }
    return list;
  }

  Value model(const std::vector<Merge>& merges, bool ignore_merges) const {
    const std::optional<std::uint32_t> unknown = special("unknown");
    Value value = step("BPE");
    value.set("dropout", Value());
    value.set("unk_token",
              unknown && pieces_ ? Value::string(vocabulary_.tokens[*unknown]) : Value());
    value.set("continuing_subword_prefix", Value());
    value.set("end_of_word_suffix", Value());
    value.set("fuse_unk", Value::boolean(pieces_));
    value.set("byte_fallback", Value::boolean(pieces_));
    value.set("ignore_merges", Value::boolean(ignore_merges));
    Value& vocab = value.set("vocab", Value::object());
    for (std::size_t id = 0; id < vocabulary_.tokens.size(); ++id) {
      if (vocabulary_.is_used(id)) vocab.append_member(vocabulary_.tokens[id], number(id));
    }
    Value& list = value.set("merges", Value::array());
    for (const auto& [left, right] : merges) {
      Value& pair = list.append(Value::array());
      pair.append(Value::string(left));
      pair.append(Value::string(right));
    }
    return value;
  }

  void add_byte_level(Value& tokenizer) {
    const PairView* pre = find("pre");
    const std::string_view name = pre == nullptr ? "" : pre->text().value_or("");
    std::optional<PreTokenizer> found = pre_tokenizer_named(name);
    if (!found) {
      fail("tokenizer.ggml.pre is " + in_quotes(name) + ", known are " + pre_tokenizer_names());
    }
    tokenizer.set("normalizer", std::move(found->normalizer));
    tokenizer.set("pre_tokenizer", std::move(found->words));
    tokenizer.set("post_processor", post_processor(found->begins));
    Value decoder = step("ByteLevel");
    for (const char* key : {"add_prefix_space", "trim_offsets", "use_regex"}) {
      decoder.set(key, Value::boolean(true));
    }
    tokenizer.set("decoder", std::move(decoder));
    tokenizer.set("model",
                  model(stored_merges(header_, vocabulary_, source_), found->ignore_merges));
  }

  void add_pieces(Value& tokenizer) {
    if (flag("remove_extra_whitespaces", false)) {
      fail("tokenizer.ggml.remove_extra_whitespaces is set, which no BPE of transformers has");
    }
    const bool blank_in_front = flag("add_space_prefix", true);
    std::vector<Value> normalizers, decoders;
    if (blank_in_front) {
      Value prepend = step("Prepend");
      prepend.set("prepend", Value::string(kBlank));
      normalizers.push_back(std::move(prepend));
    }
    normalizers.push_back(replace(" ", kBlank));
    decoders.push_back(replace(kBlank, " "));
    decoders.push_back(step("ByteFallback"));
    decoders.push_back(step("Fuse"));
    if (blank_in_front) {
      Value strip = step("Strip");
      strip.set("content", Value::string(" "));
      strip.set("start", number(1));
      strip.set("stop", number(0));
      decoders.push_back(std::move(strip));
    }
    tokenizer.set("normalizer", sequence("normalizers", std::move(normalizers)));
    tokenizer.set("pre_tokenizer", Value());
    tokenizer.set("post_processor", post_processor(true));
    tokenizer.set("decoder", sequence("decoders", std::move(decoders)));
    tokenizer.set("model", model(merges_by_score(vocabulary_, source_), false));
  }

  // [bos] text [eos], each only if it is added.
  Value post_processor(bool begins) const {
    const std::optional<std::uint32_t> bos = special("bos"), eos = special("eos");
    const bool first = flag("add_bos_token", begins), last = flag("add_eos_token", false);
    if (!first && !last) return Value();
    if ((first && !bos) || (last && !eos)) {
      fail("a token is added to every text whose number the file does not give");
    }
    Value value = step("TemplateProcessing"), tokens = Value::object();
    for (const auto& [key, texts] : {std::pair("single", 1), std::pair("pair", 2)}) {
      Value& pieces = value.set(key, Value::array());
      for (int text = 0; text < texts; ++text) {
        const auto add = [&](const char* kind, std::string_view id) {
          Value& piece = pieces.append(Value::object()).set(kind, Value::object());
          piece.set("id", Value::string(id));
          piece.set("type_id", number(static_cast<std::uint64_t>(text)));
        };
        if (first) add("SpecialToken", vocabulary_.tokens[*bos]);
        add("Sequence", text == 0 ? "A" : "B");
        if (last) add("SpecialToken", vocabulary_.tokens[*eos]);
      }
    }
    for (const auto& [added, id] : {std::pair(first, bos), std::pair(last, eos)}) {
      if (!added) continue;
      const std::string& name = vocabulary_.tokens[*id];
      Value& token = tokens.set(name, Value::object());
      token.set("id", Value::string(name));
      token.set("ids", Value::array()).append(number(*id));
      token.set("tokens", Value::array()).append(Value::string(name));
    }
    value.set("special_tokens", std::move(tokens));
    return value;
  }

  Value config() const {
    Value value;
    value.set("tokenizer_class", Value::string("PreTrainedTokenizerFast"));
    value.set("clean_up_tokenization_spaces", Value::boolean(false));
    const std::optional<std::uint32_t> eos = special("eos");
    for (const auto& [role, key] :
         {std::pair("bos", "bos_token"), std::pair("eos", "eos_token"),
          std::pair("unknown", "unk_token"), std::pair("padding", "pad_token")}) {
      const std::optional<std::uint32_t> id = special(role);
      // A file for llama.cpp has a first token, even if the model has none.
      const bool none = role == std::string_view("bos") && id == eos;
      if (id && !none) value.set(key, Value::string(vocabulary_.tokens[*id]));
    }
    const PairView* chat = header_.find("tokenizer.chat_template");
    if (chat != nullptr) {
      const std::optional<std::string_view> text = chat->text();
      if (!text || !text::is_utf8(*text)) fail("tokenizer.chat_template: wanted a text in UTF-8");
      value.set("chat_template", Value::string(*text));
    }
    return value;
  }

  // A text ends with one token; what a model generates may end with that of a turn or a message.
  std::optional<Value> generation() const {
    std::vector<std::uint32_t> ends;
    for (const char* role : {"eos", "eot", "eom"}) {
      const std::optional<std::uint32_t> id = special(role);
      if (id && std::find(ends.begin(), ends.end(), *id) == ends.end()) ends.push_back(*id);
    }
    if (ends.size() < 2) return std::nullopt;
    Value value;
    for (const auto& [role, key] :
         {std::pair("bos", "bos_token_id"), std::pair("padding", "pad_token_id")}) {
      if (const std::optional<std::uint32_t> id = special(role)) value.set(key, number(*id));
    }
    Value& list = value.set("eos_token_id", Value::array());
    for (const std::uint32_t id : ends) list.append(number(id));
    return value;
  }

  const FileHeader& header_;
  std::string_view source_;
  bool pieces_ = false;
  ImportedVocabulary vocabulary_;
};

}  // namespace

ImportedTokenizer import_tokenizer(const FileHeader& header, std::string_view source) {
  return Importer(header, source).make();
}

}  // namespace monograph::gguf
