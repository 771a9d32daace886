#include "monograph/adapter/config.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "monograph/base/error.h"
#include "monograph/text/json_scanner.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

using text::in_quotes;

constexpr int kMaxDepth = 32;
constexpr std::size_t kMaxKeys = 1000;
constexpr std::size_t kMaxEntries = 100'000;
// Of all patterns together: a thousand names of a hundred characters. Bounds the work a module,
// which tries each of them.
constexpr std::size_t kMaxPatternStates = 100'000;

using enum FieldUse;

constexpr std::array kFields = {
    AdapterField{"alora_invocation_tokens", kMustBeOff, "it acts on some tokens only"},
    AdapterField{"alpha_pattern", kUnderstood, ""},
    AdapterField{"arrow_config", kMustBeOff, "it routes between adapters by token"},
    AdapterField{"auto_mapping", kHarmless, "names a Python class"},
    AdapterField{"base_model_name_or_path", kUnderstood, ""},
    AdapterField{"bias", kUnderstood, ""},
    AdapterField{"corda_config", kMustBeOff, "CorDA changed the base weights before training"},
    AdapterField{"ensure_weight_tying", kUnderstood, ""},
    AdapterField{"eva_config", kMustBeOff, "EVA initialisation is not supported"},
    AdapterField{"exclude_modules", kHarmless,
                 "the tensors of the adapter say which modules it has"},
    AdapterField{"fan_in_fan_out", kUnderstood, ""},
    AdapterField{"inference_mode", kHarmless, "freezes parameters"},
    AdapterField{"init_lora_weights", kUnderstood, ""},
    AdapterField{"kasa_config", kMustBeOff, "KaSA changed the base weights before training"},
    AdapterField{"layer_replication", kMustBeOff, "it repeats layers of the model"},
    AdapterField{"layers_pattern", kHarmless,
                 "the tensors of the adapter say which modules it has"},
    AdapterField{"layers_to_transform", kHarmless,
                 "the tensors of the adapter say which modules it has"},
    AdapterField{"loftq_config", kMustBeOff, "LoftQ changed the base weights before training"},
    AdapterField{"lora_alpha", kUnderstood, ""},
    AdapterField{"lora_bias", kUnderstood, ""},
    AdapterField{"lora_dropout", kHarmless, "acts in training only"},
    AdapterField{"lora_ga_config", kMustBeOff, "LoRA-GA changed the base weights before training"},
    AdapterField{"megatron_config", kMustBeOff, "layers of Megatron are not supported"},
    AdapterField{"megatron_core", kHarmless, "has a meaning with megatron_config only"},
    AdapterField{"modules_to_save", kUnderstood, ""},
    AdapterField{"monteclora_config", kMustBeOff, "MonteCLoRA is not supported"},
    AdapterField{"peft_type", kUnderstood, ""},
    AdapterField{"peft_version", kUnderstood, ""},
    AdapterField{"qalora_group_size", kHarmless, "has a meaning with use_qalora only"},
    AdapterField{"r", kUnderstood, ""},
    AdapterField{"rank_pattern", kUnderstood, ""},
    AdapterField{"revision", kHarmless, "names a version of the base; its hash says more"},
    AdapterField{"runtime_config", kHarmless, "where tensors are held; never written to a file"},
    AdapterField{"target_modules", kHarmless,
                 "the tensors of the adapter say which modules it has"},
    AdapterField{"target_parameters", kUnderstood, ""},
    AdapterField{"task_type", kHarmless, "names a Python class"},
    AdapterField{"trainable_token_indices", kUnderstood, ""},
    AdapterField{"use_bdlora", kMustBeOff, "BD-LoRA is not supported"},
    AdapterField{"use_dora", kUnderstood, ""},
    AdapterField{"use_qalora", kMustBeOff, "QA-LoRA pools the inputs of a layer"},
    AdapterField{"use_rslora", kUnderstood, ""},
    AdapterField{"velora_config", kMustBeOff, "VeLoRA is not supported"},
};
static_assert(std::is_sorted(kFields.begin(), kFields.end(),
                             [](const auto& a, const auto& b) { return a.name < b.name; }));

// Those that leave the base as it is: training starts from B = 0 or from random A and B.
constexpr std::array<std::string_view, 2> kHarmlessInits = {"gaussian", "orthogonal"};
constexpr std::array<std::string_view, 3> kBiases = {"none", "all", "lora_only"};

class ConfigParser {
 public:
  ConfigParser(std::string_view json, std::string_view source)
      : source_(source), scanner_(json, source) {}

  AdapterConfig parse() {
    scanner_.object([this](std::string_view key) {
      if (keys_.size() == kMaxKeys) scanner_.fail("more than 1000 keys at the top");
      keys_.push_back(key);
      field(key);
    });
    scanner_.expect_end();
    check_duplicates(keys_, "");
    if (!has("peft_type")) fail("peft_type is missing; it must be \"LORA\"");
    if (!has("r")) fail("r is missing");
    if (!has("lora_alpha")) fail("lora_alpha is missing");
    return std::move(config_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(std::string(source_) + ": " + what);
  }
  bool has(std::string_view key) const {
    return std::find(keys_.begin(), keys_.end(), key) != keys_.end();
  }
  void check_duplicates(const std::vector<std::string_view>& keys, std::string_view where) const {
    const auto at = [&](std::size_t i) { return keys[i]; };
    if (const auto key = text::find_duplicate(keys.size(), at)) {
      fail(std::string(where) + "duplicate key " + in_quotes(*key));
    }
  }

  void field(std::string_view key) {
    const auto row = std::lower_bound(
        kFields.begin(), kFields.end(), key,
        [](const AdapterField& field, std::string_view name) { return field.name < name; });
    if (row == kFields.end() || row->name != key) {
      if (accept_null()) return;
      fail("field " + in_quotes(key) +
           " is not one that PEFT 0.21 has for LoRA, and is set; what " +
           "it does to a merge is not known");
    }
    if (row->use == kHarmless) return scanner_.skip_value(kMaxDepth);
    if (row->use == kMustBeOff) return must_be_off(*row);
    understood(key);
  }

  void must_be_off(const AdapterField& row) {
    const char first = scanner_.peek();
    bool off = first == 'n' || first == 'f';
    if (first == '{' || first == '[') {
      off = true;
      const auto not_empty = [&] {
        off = false;
        scanner_.skip_value(kMaxDepth);
      };
      if (first == '{') {
        scanner_.object([&](std::string_view) { not_empty(); });
      } else {
        scanner_.array(not_empty);
      }
    } else {
      scanner_.skip_value(kMaxDepth);
    }
    if (!off) {
      fail("field " + in_quotes(row.name) +
           " is set, and such an adapter cannot be merged: " + std::string(row.reason));
    }
  }

  void understood(std::string_view key) {
    if (key == "r") {
      config_.rank = rank(key);
    } else if (key == "lora_alpha") {
      config_.alpha = number(key);
    } else if (key == "rank_pattern") {
      config_.rank_pattern = rules(key, /*ranks=*/true);
    } else if (key == "alpha_pattern") {
      config_.alpha_pattern = rules(key, /*ranks=*/false);
    } else if (key == "use_rslora") {
      config_.use_rslora = boolean(key);
    } else if (key == "use_dora") {
      config_.use_dora = boolean(key);
    } else if (key == "lora_bias") {
      config_.lora_bias = boolean(key);
    } else if (key == "fan_in_fan_out") {
      config_.fan_in_fan_out = boolean(key);
    } else if (key == "ensure_weight_tying") {
      config_.ensure_weight_tying = boolean(key);
    } else if (key == "modules_to_save") {
      config_.modules_to_save = strings(key);
    } else if (key == "trainable_token_indices") {
      trainable_tokens();
    } else if (key == "base_model_name_or_path") {
      if (!accept_null()) config_.base_model_name_or_path = text(key);
    } else if (key == "target_parameters") {
      config_.target_parameters = strings(key);
    } else if (key == "peft_version") {
      if (!accept_null()) config_.peft_version = text(key);
    } else if (key == "peft_type") {
      one_of(key, std::array<std::string_view, 1>{"LORA"});
    } else if (key == "bias") {
      // The tensors of the adapter say which biases were trained.
      one_of(key, kBiases);
    } else {
      init_lora_weights();
    }
  }

  void init_lora_weights() {
    const char first = scanner_.peek();
    if (first == 't' || first == 'f') return scanner_.skip_value(kMaxDepth);
    const std::string_view name = text("init_lora_weights");
    if (name == "monograph_residual") {
      fail(
          "field 'init_lora_weights' is \"monograph_residual\": the adapter has changed its packed "
          "base (PiSSA, LoftQ), and the two are not W + B A; merge_and_unload in Python merges it");
    }
    if (std::find(kHarmlessInits.begin(), kHarmlessInits.end(), name) == kHarmlessInits.end()) {
      fail(
          "field 'init_lora_weights' is " + in_quotes(name) +
          ", and such an adapter cannot be merged onto the base as it is: initialisations other "
          "than true, false, gaussian and orthogonal may change the base weights before training "
          "(PEFT can convert the adapter when it saves: path_initial_model_for_weight_conversion)");
    }
  }

  template <std::size_t N>
  void one_of(std::string_view key, const std::array<std::string_view, N>& allowed) {
    const std::string_view value = text(key);
    if (std::find(allowed.begin(), allowed.end(), value) != allowed.end()) return;
    std::string wanted;
    for (const std::string_view name : allowed) {
      wanted += (wanted.empty() ? "" : " or ") + in_quotes(name);
    }
    fail(std::string(key) + " is " + in_quotes(value) + ", must be " + wanted);
  }

  bool accept_null() {
    if (scanner_.peek() != 'n') return false;
    scanner_.skip_value(0);
    return true;
  }

  bool boolean(std::string_view key) {
    const char first = scanner_.peek();
    if (first != 't' && first != 'f' && first != 'n') {
      scanner_.fail(std::string(key) + " must be true or false");
    }
    scanner_.skip_value(0);
    return first == 't';
  }

  std::string_view text(std::string_view key) {
    if (scanner_.peek() != '"') scanner_.fail(std::string(key) + " must be a string");
    return scanner_.string();
  }

  double number(std::string_view key) {
    const char first = scanner_.peek();
    if (first != '-' && (first < '0' || first > '9')) {
      scanner_.fail(std::string(key) + " must be a number");
    }
    const std::string_view digits = scanner_.number();
    double value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc() || end != digits.data() + digits.size() || !std::isfinite(value)) {
      scanner_.fail(std::string(key) + " is " + std::string(digits.substr(0, 40)) +
                    ", which a double cannot hold");
    }
    return value;
  }

  std::uint64_t rank(std::string_view key) {
    const std::uint64_t value = scanner_.unsigned_integer();
    if (value == 0 || value > kMaxLoraRank) {
      scanner_.fail(std::string(key) + ": a rank is " + std::to_string(value) +
                    ", must be 1 to 65536");
    }
    return value;
  }

  std::vector<RankRule> rules(std::string_view key, bool ranks) {
    std::vector<RankRule> result;
    if (accept_null()) return result;
    std::vector<std::string_view> names;
    scanner_.object([&](std::string_view name) {
      if (names.size() == kMaxKeys) scanner_.fail(std::string(key) + ": more than 1000 patterns");
      names.push_back(name);
      const double value = ranks ? static_cast<double>(rank(key)) : number(key);
      const std::string where = std::string(source_) + ": " + std::string(key);
      result.push_back({std::string(name), ModulePattern(name, where), value});
      pattern_states_ += result.back().pattern.size();
      if (pattern_states_ > kMaxPatternStates) {
        scanner_.fail(std::string(key) + ": the patterns together have more than 100000 states");
      }
    });
    check_duplicates(names, std::string(key) + ": ");
    return result;
  }

  std::vector<std::string> strings(std::string_view key) {
    std::vector<std::string> result;
    if (accept_null()) return result;
    if (scanner_.peek() != '[') scanner_.fail(std::string(key) + " must be a list of strings");
    scanner_.array([&] {
      if (result.size() == kMaxEntries) scanner_.fail(std::string(key) + " is too long");
      result.emplace_back(text(key));
    });
    return result;
  }

  void trainable_tokens() {
    if (accept_null()) return;
    if (scanner_.peek() == '[') {
      config_.trainable_tokens.push_back({"", tokens()});
      return;
    }
    std::vector<std::string_view> names;
    scanner_.object([&](std::string_view module) {
      if (names.size() == kMaxKeys) scanner_.fail("trainable_token_indices: too many modules");
      if (module.empty()) scanner_.fail("trainable_token_indices: a module without a name");
      names.push_back(module);
      if (scanner_.peek() != '[') scanner_.fail("trainable_token_indices must hold lists");
      config_.trainable_tokens.push_back({std::string(module), tokens()});
    });
    check_duplicates(names, "trainable_token_indices: ");
  }

  std::vector<std::uint64_t> tokens() {
    std::vector<std::uint64_t> result;
    scanner_.array([&] {
      if (result.size() == kMaxEntries) scanner_.fail("trainable_token_indices is too long");
      result.push_back(scanner_.unsigned_integer());
    });
    std::vector<std::uint64_t> sorted = result;
    std::sort(sorted.begin(), sorted.end());
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    if (twice != sorted.end()) {
      scanner_.fail("trainable_token_indices names token " + std::to_string(*twice) + " twice");
    }
    return result;
  }

  std::string_view source_;
  text::JsonScanner scanner_;
  std::vector<std::string_view> keys_;
  std::size_t pattern_states_ = 0;
  AdapterConfig config_;
};

double value_for(const std::vector<RankRule>& rules, std::string_view module, double otherwise) {
  for (const RankRule& rule : rules) {
    if (rule.pattern.matches(module)) return rule.value;
  }
  return otherwise;
}

}  // namespace

bool AdapterConfig::keeps_order_of_parameters() const {
  unsigned major = 0, minor = 0;
  const char *begin = peft_version.data(), *end = begin + peft_version.size();
  const auto [dot, error] = std::from_chars(begin, end, major);
  if (error != std::errc() || dot == end || *dot != '.') return false;
  if (std::from_chars(dot + 1, end, minor).ec != std::errc()) return false;
  return major > 0 || minor >= 20;
}

std::span<const AdapterField> adapter_fields() { return kFields; }

std::uint64_t AdapterConfig::rank_of(std::string_view module) const {
  return static_cast<std::uint64_t>(value_for(rank_pattern, module, static_cast<double>(rank)));
}

double AdapterConfig::scale_of(std::string_view module) const {
  const auto rank_here = static_cast<double>(rank_of(module));
  const double alpha_here = value_for(alpha_pattern, module, alpha);
  return alpha_here / (use_rslora ? std::sqrt(rank_here) : rank_here);
}

bool AdapterConfig::targets(std::string_view parameter) const {
  return std::any_of(target_parameters.begin(), target_parameters.end(),
                     [&](const std::string& target) {
                       return parameter == target ||
                              (parameter.size() > target.size() && parameter.ends_with(target) &&
                               parameter[parameter.size() - target.size() - 1] == '.');
                     });
}

AdapterConfig parse_adapter_config(std::string_view json, std::string_view source) {
  if (json.size() > kMaxAdapterConfigBytes) {
    throw Error(std::string(source) + ": has " + std::to_string(json.size()) +
                " bytes, at most 1000000 are allowed");
  }
  return ConfigParser(json, source).parse();
}

}  // namespace monograph
