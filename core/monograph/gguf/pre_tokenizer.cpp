// How a byte-level BPE cuts text into words, by the names of llama.cpp.
#include <array>

#include "monograph/base/error.h"
#include "monograph/gguf/vocabulary.h"
#include "monograph/text/utf8.h"

namespace monograph::gguf {
namespace {

using json::Value;
using text::in_quotes;

struct Splitter {
  std::string_view name;
  std::string_view pattern;  // of tokenizer.json
  bool ignore_merges;        // a word that is a token is one, whatever the merges make of it
  bool begins;               // llama.cpp puts the first token in front unless the file says no
  bool composes;             // the models that have it come with NFC
};
constexpr std::string_view kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kTekken =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kO200k =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::array kSplitters = {
    Splitter{"llama-bpe", kLlama3, true, true, false},
    Splitter{"smaug-bpe", kLlama3, false, false, false},
    Splitter{"qwen2", kQwen2, false, false, true},
    Splitter{"tekken", kTekken, true, true, false},
    Splitter{"gpt-4o", kO200k, false, false, false},
};

bool flag(const Value* object, std::string_view key, bool otherwise) {
  const Value* value = present(object, key);
  return value == nullptr ? otherwise : value->as_bool().value_or(otherwise);
}

std::string_view text_of(const Value* value) {
  return value == nullptr ? std::string_view() : value->as_string().value_or("");
}

Value byte_level(bool regex) {
  Value step;
  step.set("type", Value::string("ByteLevel"));
  step.set("add_prefix_space", Value::boolean(false));
  step.set("trim_offsets", Value::boolean(true));
  step.set("use_regex", Value::boolean(regex));
  return step;
}

Value split(std::string_view pattern) {
  Value step;
  step.set("type", Value::string("Split"));
  step.set("pattern", Value::object()).set("Regex", Value::string(pattern));
  step.set("behavior", Value::string("Isolated"));
  step.set("invert", Value::boolean(false));
  return step;
}

Value single_digits() {
  Value step;
  step.set("type", Value::string("Digits"));
  step.set("individual_digits", Value::boolean(true));
  return step;
}

Value sequence(Value first, Value second) {
  Value steps;
  steps.set("type", Value::string("Sequence"));
  Value& list = steps.set("pretokenizers", Value::array());
  list.append(std::move(first));
  list.append(std::move(second));
  return steps;
}

}  // namespace

std::optional<PreTokenizer> pre_tokenizer_named(std::string_view name) {
  if (name == "gpt-2") return PreTokenizer{{}, byte_level(true)};
  if (name == "smollm") return PreTokenizer{{}, sequence(single_digits(), byte_level(true))};
  for (const Splitter& row : kSplitters) {
    if (row.name != name) continue;
    PreTokenizer found = {{}, sequence(split(row.pattern), byte_level(false))};
    if (row.composes) found.normalizer.set("type", Value::string("NFC"));
    found.ignore_merges = row.ignore_merges;
    found.begins = row.begins;
    return found;
  }
  return std::nullopt;
}

std::string pre_tokenizer_names() {
  std::string text = "gpt-2, smollm";
  for (const Splitter& row : kSplitters) text.append(", ").append(row.name);
  return text;
}

std::string_view pre_tokenizer_name(const Value& tokenizer, std::string_view source) {
  const auto fail = [&](const std::string& what) {
    throw Error(std::string(source) + ": " + what);
  };
  for (const Value* step : steps_of(present(&tokenizer, "normalizer"), "normalizers")) {
    // llama.cpp takes text as it comes: the same for text that is composed already.
    if (type_of(step) != "NFC") {
      fail("normalizer " + in_quotes(type_of(step)) + ": llama.cpp has none for byte-level BPE");
    }
  }
  const std::vector<const Value*> steps =
      steps_of(present(&tokenizer, "pre_tokenizer"), "pretokenizers");
  if (steps.empty() || type_of(steps.back()) != "ByteLevel" || steps.size() > 2) {
    fail("pre_tokenizer: wanted ByteLevel at the end, behind at most one step");
  }
  const bool regex = flag(steps.back(), "use_regex", true);
  if (flag(steps.back(), "add_prefix_space", true)) {
    fail("pre_tokenizer: add_prefix_space is set, which llama.cpp does not have here");
  }
  const bool ignore_merges = flag(present(&tokenizer, "model"), "ignore_merges", false);
  if (steps.size() == 1 && regex && !ignore_merges) return "gpt-2";
  if (steps.size() == 2 && type_of(steps[0]) == "Digits" && regex && !ignore_merges &&
      flag(steps[0], "individual_digits", false)) {
    return "smollm";
  }
  if (steps.size() == 2 && type_of(steps[0]) == "Split" && !regex) {
    const std::string_view pattern = text_of(present(present(steps[0], "pattern"), "Regex"));
    const bool isolated =
        text_of(present(steps[0], "behavior")) == "Isolated" && !flag(steps[0], "invert", false);
    for (const Splitter& row : kSplitters) {
      if (isolated && row.pattern == pattern && row.ignore_merges == ignore_merges) return row.name;
    }
    fail("pre_tokenizer: llama.cpp has no name for the regular expression " + in_quotes(pattern) +
         (ignore_merges ? " with" : " without") + " ignore_merges");
  }
  fail(
      "pre_tokenizer: known are one regular expression, ByteLevel alone, and single digits before "
      "it");
  return {};
}

}  // namespace monograph::gguf
