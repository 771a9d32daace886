#include "monograph/train/target_modules.h"

#include "monograph/base/error.h"

namespace monograph::train {
namespace {

constexpr std::size_t kLongestPattern = 200;
constexpr const char* kWanted =
    "letters, digits, _ . - | * + ? ( ) [ ] and \\. \\d \\w; or a list of names";

bool is_letter_or_digit(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

// Sets whose first character is ], [ or ^], groups with a name or a condition, and quantifiers one
// behind the other are what the two languages read otherwise, or only one of them reads.
bool is_simple(std::string_view text) {
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i], next = i + 1 < text.size() ? text[i + 1] : '\0';
    if (c == '\\') {
      if (next != '.' && next != 'd' && next != 'w') return false;
      ++i;
    } else if (c == '[') {
      if (next == ']' || next == '^' || next == '\0') return false;
      for (++i; i < text.size() && text[i] != ']'; ++i) {
        if (text[i] == '\\' && i + 1 < text.size() && (text[i + 1] == 'd' || text[i + 1] == 'w'))
          ++i;
        else if (!is_letter_or_digit(text[i]) && text[i] != '.' && text[i] != '-')
          return false;
      }
      if (i == text.size()) return false;
    } else if (c == '(') {
      if (next == '?') {
        if (!text.substr(i).starts_with("(?:")) return false;
        i += 2;
      }
    } else if (c == '*' || c == '+' || c == '?') {
      if (next == '*' || next == '+' || next == '?') return false;
    } else if (!is_letter_or_digit(c) &&
               std::string_view(".-|)").find(c) == std::string_view::npos) {
      return false;
    }
  }
  return true;
}

}  // namespace

bool ends_with_name(std::string_view module, std::string_view name) {
  if (!module.ends_with(name)) return false;
  return module.size() == name.size() || module[module.size() - name.size() - 1] == '.';
}

std::regex compile_pattern(const std::string& text) {
  const std::string found = "lora_target_modules is the regular expression " + text + ", wanted ";
  if (text.size() > kLongestPattern || !is_simple(text)) throw Error(found + kWanted);
  try {
    return std::regex(text, std::regex::ECMAScript);
  } catch (const std::regex_error&) {
    throw Error(found + "one that can be read, or a list of names");
  }
}

void check_takes_projections_alone(const TargetModules& targets, std::size_t layers) {
  if (targets.pattern.empty()) return;
  const std::regex pattern = compile_pattern(targets.pattern);
  std::vector<std::string> others = {
      "",       "model", "model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb",
      "lm_head"};
  for (std::size_t i = 0; i < layers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i);
    for (const char* const part :
         {"", ".self_attn", ".self_attn.q_norm", ".self_attn.k_norm", ".mlp", ".mlp.act_fn",
          ".input_layernorm", ".post_attention_layernorm", ".pre_feedforward_layernorm",
          ".post_feedforward_layernorm"})
      others.push_back(layer + part);
  }
  for (const std::string& other : others)
    if (std::regex_match(other, pattern))
      throw Error("lora_target_modules: the expression " + targets.pattern + " takes " +
                  (other.empty() ? "the model itself" : other) +
                  ", too, wanted projections of attention and MLP alone");
}

}  // namespace monograph::train
