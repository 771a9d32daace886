#include "monograph/serving/rules.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"
#include "monograph/serving/gguf_names.h"
#include "monograph/serving/layers.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

using text::in_quotes;
using enum Server;

// The largest --max-lora-rank that vLLM takes.
constexpr std::uint64_t kVllmMaxRank = 512;
constexpr std::string_view kMergeAdvice = "; merge it into the base (monograph merge)";
constexpr std::string_view kConvertAdvice =
    "; monograph adapter convert writes a form that it applies";

enum class Cure : std::uint8_t { kNone, kMerge, kConvert };

std::string number_text(double value) { return json::Value::number(value).text(); }

bool is_set(const json::Value& config, std::string_view key) {
  const json::Value* value = config.find(key);
  if (value == nullptr) return false;
  switch (value->kind()) {
    case json::Kind::kNull:
      return false;
    case json::Kind::kBool:
      return value->as_bool().value_or(false);
    case json::Kind::kArray:
      return !value->items().empty();
    case json::Kind::kObject:
      return !value->members().empty();
    case json::Kind::kNumber:
    case json::Kind::kString:
      break;
  }
  return true;
}

std::string_view leaf_of(std::string_view module) {
  return module.substr(module.rfind('.') + 1);  // npos + 1 is 0
}

// The first element that is no finite number.
std::optional<std::size_t> first_not_finite(const std::vector<float>& values) {
  const auto found =
      std::find_if(values.begin(), values.end(), [](float value) { return !std::isfinite(value); });
  if (found == values.end()) return std::nullopt;
  return static_cast<std::size_t>(found - values.begin());
}

class Checker {
 public:
  explicit Checker(const ServingCheck& check)
      : check_(check), config_(*check.config), base_(*check.base), server_(check.server) {}

  std::vector<ServingFinding> run() {
    parse_config();
    check_config();
    const AdapterTensors tensors = collect_tensors(*check_.adapter);
    take(tensors.problems);
    for (const KeyedTensor& tensor : tensors.all) check_tensor(tensor);
    if (tensors.factors.empty()) add("key", "adapter_model", "the adapter has no LoRA tensor");
    const Placement placement = place_factors(tensors, base_, parsed_ ? &*parsed_ : nullptr);
    take(placement.problems);
    for (const PlacedFactors& placed : placement.placed) check_placed(placed);
    check_groups(tensors, placement.placed);
    return std::move(findings_);
  }

 private:
  void add(std::string_view rule, const std::string& key, const std::string& what,
           Cure cure = Cure::kNone) {
    const std::string_view advice = cure == Cure::kMerge     ? kMergeAdvice
                                    : cure == Cure::kConvert ? kConvertAdvice
                                                             : std::string_view();
    findings_.push_back({rule, key, what + std::string(advice), cure == Cure::kConvert});
  }
  void take(const std::vector<ServingFinding>& problems) {
    findings_.insert(findings_.end(), problems.begin(), problems.end());
  }
  std::string title() const { return std::string(title_of(server_)); }
  bool is_peft() const { return server_ == kPeft; }

  void parse_config() {
    try {
      parsed_ = parse_adapter_config(json::dump(config_), check_.config_path);
    } catch (const Error& error) {
      add("config", "adapter_config.json", error.what());
    }
  }

  void check_config() {
    if (is_peft()) return;
    if (is_set(config_, "use_dora")) {
      add("dora", "use_dora", title() + " does not apply DoRA", Cure::kMerge);
    }
    if (is_set(config_, "modules_to_save")) {
      add("modules-to-save", "modules_to_save",
          title() + " does not load whole modules from an adapter", Cure::kMerge);
    }
    if (is_set(config_, "trainable_token_indices")) {
      add("tokens", "trainable_token_indices",
          title() + " does not load trained tokens from an adapter", Cure::kMerge);
    }
    const json::Value* bias = config_.find("bias");
    if (bias != nullptr && bias->as_string() && *bias->as_string() != "none") {
      add("bias", "bias",
          "is " + in_quotes(*bias->as_string()) + "; " + title() + " loads no bias from an adapter",
          Cure::kMerge);
    }
    check_target_modules();
    check_rank("r", parsed_ ? parsed_->rank : 0);
    if (server_ == kLlamaCpp && !find_gguf_architecture(base_)) {
      add("architecture", "model_type",
          "the base is " + in_quotes(base_.model_type()) +
              "; names of its tensors in llama.cpp "
              "are known for " +
              gguf::model_types(),
          Cure::kMerge);
    }
  }

  void check_target_modules() {
    if (server_ == kLlamaCpp) return;  // reads the names of the tensors
    const json::Value* targets = config_.find("target_modules");
    const bool none = targets == nullptr || targets->is(json::Kind::kNull);
    if (none && (targets == nullptr || server_ == kSglang)) {
      return add("target-modules", "target_modules",
                 title() + " wants it, a list of names of modules", Cure::kConvert);
    }
    if (!none && !targets->is(json::Kind::kString) && !targets->is(json::Kind::kArray)) {
      return add("target-modules", "target_modules", "is neither a list of names nor a string",
                 Cure::kConvert);
    }
    if (server_ != kSglang || none) return;
    if (const auto text = targets->as_string()) {
      if (*text != "all" && *text != "all-linear") {
        add("target-modules", "target_modules",
            "is the regular expression " + in_quotes(*text) +
                ", which SGLang refuses (sglang#25913)",
            Cure::kConvert);
      }
      return;
    }
    for (const json::Value& item : targets->items()) {
      if (item.text().find('.') == std::string::npos) continue;
      return add("target-modules", "target_modules",
                 "names " + in_quotes(item.text()) +
                     ", wanted the last part of a name alone "
                     "(sglang#11034)",
                 Cure::kConvert);
    }
  }

  void check_rank(const std::string& key, std::uint64_t rank) {
    const std::uint64_t largest =
        check_.max_rank.value_or(server_ == kVllm ? kVllmMaxRank : UINT64_MAX);
    if (rank > largest) {
      add("max-rank", key,
          "the rank is " + std::to_string(rank) + ", the server takes at most " +
              std::to_string(largest),
          Cure::kMerge);
    }
  }

  void check_tensor(const KeyedTensor& tensor) {
    const std::string& name = tensor.name();
    if (tensor.key.prefixes != 1) {
      add("prefix", name,
          "begins with base_model.model. " + std::to_string(tensor.key.prefixes) +
              " times, wanted once",
          base_.find(tensor.key.module) ? Cure::kConvert : Cure::kNone);
    }
    if (!tensor.key.adapter_name.empty()) {
      add("adapter-name", name,
          "has the name " + in_quotes(tensor.key.adapter_name) + " of the adapter in it, which " +
              title() + " does not expect",
          Cure::kConvert);
    }
    switch (tensor.key.role) {
      case TensorRole::kA:
      case TensorRole::kB:
        return check_finite(tensor);
      case TensorRole::kUnknown:
        return add("key", name, "is no kind of tensor that LoRA of PEFT has");
      case TensorRole::kBaseLayer:
        return check_base_layer(tensor);
      default:
        break;
    }
    if (is_peft()) return;
    if (tensor.key.role == TensorRole::kMagnitude) {
      add("dora", name, title() + " does not apply DoRA", Cure::kMerge);
    } else if (tensor.key.role == TensorRole::kFactorBias) {
      add("bias", name, title() + " does not load the bias of a factor", Cure::kMerge);
    } else if (tensor.key.role == TensorRole::kTokens) {
      add("tokens", name, title() + " does not load trained tokens", Cure::kMerge);
    } else if (name.ends_with(".bias")) {
      add("bias", name, title() + " loads no bias from an adapter", Cure::kMerge);
    } else {
      add("modules-to-save", name, title() + " does not load whole modules from an adapter",
          Cure::kMerge);
    }
  }

  void check_finite(const KeyedTensor& tensor) {
    if (!float_type(tensor.tensor.entry->dtype)) return;  // found elsewhere
    const std::vector<float> values = read_floats(tensor.tensor);
    if (const auto at = first_not_finite(values)) {
      add("not-finite", tensor.name(),
          "element " + std::to_string(*at) + " is " +
              (std::isnan(values[*at]) ? "NaN" : "infinite"));
    }
  }

  // Skipped by the servers: harmless if it is the base's.
  void check_base_layer(const KeyedTensor& tensor) {
    if (is_peft()) return;
    const std::optional<BaseMatrix> matrix = base_.find(tensor.key.module);
    const std::string& name = tensor.name();
    if (!matrix) {
      return add("base", name, "the base has no module " + in_quotes(tensor.key.module));
    }
    if (tensor.tensor.entry->shape != matrix->shape) {
      return add("base-layer", name,
                 "has shape " + shape_in_brackets(tensor.tensor.entry->shape) + ", the base has " +
                     shape_in_brackets(matrix->shape) + "; " + title() + " ignores it",
                 Cure::kMerge);
    }
    if (!float_type(tensor.tensor.entry->dtype) || !matrix->weight->is_readable()) return;
    if (tensor.tensor.entry->elements == 0) return;
    const std::vector<float> values = read_floats(tensor.tensor);
    const DType type = *float_type(tensor.tensor.entry->dtype);
    std::vector<float> row(matrix->shape[1]);
    for (std::uint64_t i = 0; i < matrix->shape[0]; ++i) {
      read_row(*matrix->weight, i, type, row);
      if (!std::equal(row.begin(), row.end(),
                      values.begin() + static_cast<std::ptrdiff_t>(i * row.size()))) {
        return add("base-layer", name,
                   "differs from the base in row " + std::to_string(i) + ", and " + title() +
                       " ignores it",
                   Cure::kMerge);
      }
    }
  }

  static void read_row(const Weight& weight, std::uint64_t row, DType type,
                       std::vector<float>& out) {
    with_type(type, [&]<class T>() {
      std::vector<T> stored(out.size());
      read_elements(weight, row * out.size(), (row + 1) * out.size(), type, stored.data());
      for (std::size_t i = 0; i < out.size(); ++i) out[i] = to_float(stored[i]);
    });
  }

  void check_placed(const PlacedFactors& placed) {
    const std::string& key = placed.factors->a->name();
    if (parsed_) {
      const std::uint64_t wanted = parsed_->rank_of(placed.name);
      if (placed.rank != wanted) {
        add("rank", key,
            "has rank " + std::to_string(placed.rank) + ", the config gives it " +
                std::to_string(wanted));
      } else if (!is_peft()) {
        check_scale(placed);
      }
    }
    if (is_peft() ? placed.swapped : placed.experts != 0) return check_experts(placed);
    if (is_peft()) return;
    if (server_ == kLlamaCpp && base_.is_tied() &&
        (placed.matrix.head || placed.matrix.embedding)) {
      check_tied(placed);
    }
    if (server_ == kLlamaCpp && find_gguf_architecture(base_) && !gguf_place(base_, placed)) {
      add("module", key, "llama.cpp has no tensor for LoRA of " + in_quotes(placed.name),
          Cure::kMerge);
    }
  }

  // What the server multiplies B * A with, against what PEFT does.
  void check_scale(const PlacedFactors& placed) {
    const AdapterConfig& config = *parsed_;
    const std::string& key = placed.factors->a->name();
    const auto rank = static_cast<double>(server_ == kLlamaCpp ? placed.rank : config.rank);
    const bool one_expert =
        parse_expert_name(placed.factors->module + ".weight").has_value() || placed.experts != 0;
    const bool knows_rslora = server_ == kVllm && !one_expert;
    const double applied =
        config.alpha / (config.use_rslora && knows_rslora ? std::sqrt(rank) : rank);
    const double trained = config.scale_of(placed.name);
    if (std::abs(applied - trained) > 1e-9 * std::abs(trained)) {
      add("scale", key,
          title() + (server_ == kVllm ? " before 0.32" : "") + " multiplies with " +
              number_text(applied) + ", it was trained with " + number_text(trained) + " (" +
              why_scaled() + ")",
          Cure::kConvert);
    } else if (server_ == kSglang && placed.rank != config.rank) {
      add("rank", key,
          "has rank " + std::to_string(placed.rank) + ", SGLang wants r, " +
              std::to_string(config.rank) + ", everywhere",
          Cure::kConvert);
    }
    if (placed.rank > config.rank) check_rank(key, placed.rank);
  }

  std::string why_scaled() const {
    std::string fields;
    const auto name = [&](const char* field, bool used) {
      if (used) fields += (fields.empty() ? "" : ", ") + std::string(field);
    };
    name("rank_pattern", !parsed_->rank_pattern.empty());
    name("alpha_pattern", !parsed_->alpha_pattern.empty());
    name("use_rslora", parsed_->use_rslora);
    return fields;
  }

  void check_experts(const PlacedFactors& placed) {
    const std::string& key = placed.factors->a->name();
    if (placed.swapped) {
      return add("experts-transposed", key,
                 "inputs and outputs of the experts are exchanged: A has " +
                     std::to_string(placed.outputs()) + " columns, the experts have " +
                     std::to_string(placed.inputs()) + " inputs",
                 is_peft() || can_be_single(placed) ? Cure::kConvert : Cure::kMerge);
    }
    const bool single = can_be_single(placed);
    add("experts", key,
        "is the LoRA of " + std::to_string(placed.experts) +
            " experts in one tensor (target_parameters), which " + title() +
            " does not read as PEFT does" + (single ? "" : why_not_single()),
        single ? Cure::kConvert : Cure::kMerge);
  }

  std::string why_not_single() const {
    const std::string type = ", and model_type " + in_quotes(base_.model_type());
    const ExpertLayout* layout = base_.expert_layout();
    if (layout == nullptr) return type + " is none whose experts are known";
    return layout->modules == ExpertModules::kNone ? type + " has no modules of single experts"
                                                   : "";
  }

  bool can_be_single(const PlacedFactors& placed) const {
    return server_ == kLlamaCpp
               ? gguf_place(base_, placed).has_value()
               : single_expert(base_, placed, 0, parts_of(base_, placed).front(), server_)
                     .has_value();
  }

  void check_tied(const PlacedFactors& placed) {
    add("tied-head", placed.factors->a->name(),
        "head and input embedding of the base are one tensor, and llama.cpp has one LoRA for both",
        Cure::kMerge);
  }

  // Layers that a server keeps as one: it wants LoRA for all parts or for none.
  void check_groups(const AdapterTensors& tensors, const std::vector<PlacedFactors>& placed) {
    for (const PlacedFactors& one : placed) {
      const std::string& module = one.factors->module;
      for (const std::string& other : required_with(base_, server_, module)) {
        if (tensors.factors.contains(other)) continue;
        add("group", one.factors->a->name(),
            title() + " keeps it in one layer with " + in_quotes(leaf_of(other)) +
                " and wants LoRA for both",
            Cure::kConvert);
        break;
      }
    }
  }

  const ServingCheck& check_;
  const json::Value& config_;
  const BaseModules& base_;
  Server server_;
  std::optional<AdapterConfig> parsed_;
  std::vector<ServingFinding> findings_;
};

}  // namespace

std::vector<ServingFinding> broken_rules(const ServingCheck& check) { return Checker(check).run(); }

}  // namespace monograph
