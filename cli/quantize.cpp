// monograph quantize: a model folder to a packed format, as the format's producers write it.
#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include "block_size.h"
#include "convert_folder.h"
#include "monograph/base/error.h"
#include "monograph/quant_methods/packed_parts.h"
#include "monograph/quant_methods/quantization_config.h"
#include "monograph/quant_methods/skip_reason.h"
#include "monograph/weights/experts.h"
#include "pattern.h"

namespace monograph::cli {
namespace {

struct Options {
  FolderOptions folder;
  std::string to = "nf4", nonfinite = "error", compute_dtype, experts = "keep", calibration;
  std::optional<std::size_t> block;
  bool double_quant = false, asymmetric = false, requantize = false;
  std::vector<std::string> include, exclude, tensor_types;
};

// --tensor-type REGEX=TYPE
struct TypeRule {
  Pattern pattern;
  std::string type;
};

std::vector<TypeRule> type_rules(const std::vector<std::string>& texts) {
  std::vector<TypeRule> rules;
  for (const std::string& text : texts) {
    const auto equals = text.rfind('=');
    const std::string type = equals == std::string::npos ? "" : text.substr(equals + 1);
    if (type != "keep" && !written_format(type) && !find_dtype(type)) {
      throw UsageError("--tensor-type '" + text +
                       "': wanted REGEX=nf4|fp4|mxfp4|mxfp8|nvfp4|fp8-block|int4|int8|fp8|bf16|"
                       "fp16|fp32|keep");
    }
    rules.push_back({Pattern(text.substr(0, equals)), type});
  }
  return rules;
}

class Chooser {
 public:
  explicit Chooser(const Options& options)
      : options_(options),
        include_(patterns(options.include)),
        exclude_(patterns(options.exclude)),
        rules_(type_rules(options.tensor_types)) {}

  Conversion choose(const Weight& weight) {
    std::string_view why = skip_reason(weight);
    if (why == "expert" && options_.experts == "separate") why = {};
    const std::string type = type_of(weight, why);
    if (options_.experts == "stack" && is_so_already(weight, type)) return {.weight = &weight};
    return convert_to(weight, type);
  }
  // A stack of experts. What becomes of its members if it is not quantised as a whole is theirs to
  // say: then nothing is returned.
  std::optional<Conversion> choose_stack(const Weight& stack) {
    const bool wanted = options_.experts == "stack" || any_matches(include_, stack.name);
    const std::string type = type_of(stack, wanted ? "" : "expert");
    if (!written_format(type)) return std::nullopt;
    if (is_so_already(stack, type)) {
      if (stack.composed && !stack.composed->transposed) {
        return Conversion{.weight = &stack, .stack = Stack::kOwn};
      }
      return std::nullopt;
    }
    Conversion conversion = convert_to(stack, type);
    conversion.stack = Stack::kOwn;
    return conversion;
  }
  std::uint64_t experts() const { return experts_; }
  // Whether the command line asks for this weight by name.
  bool names(const Weight& weight) const {
    return any_matches(include_, weight.name) ||
           std::any_of(rules_.begin(), rules_.end(),
                       [&](const TypeRule& rule) { return rule.pattern.matches(weight.name); });
  }

 private:
  // Packed experts are stacked as they are, and what is packed beside them stays.
  bool is_so_already(const Weight& weight, const std::string& type) const {
    return weight.is_packed() && weight.format == type && !options_.requantize;
  }

  Conversion convert_to(const Weight& weight, const std::string& type) const {
    Conversion conversion;
    conversion.weight = &weight;
    conversion.nonfinite =
        options_.nonfinite == "saturate" ? NonFinite::kSaturate : NonFinite::kError;
    if (const auto format = written_format(type)) {
      conversion.action = Action::kQuantize;
      conversion.format = *format;
      conversion.block = block_size(*format, options_.block);
      conversion.double_quant = options_.double_quant && find_format(*format)->double_quant;
      conversion.rule = zero_point_rule(*format, options_.asymmetric);
      fit_groups(conversion);
    } else if (const auto dtype = find_dtype(type)) {
      conversion.action = weight.format == type ? Action::kCopy : Action::kCast;
      conversion.dtype = *dtype;
    }
    if (conversion.action != Action::kCopy) check_source(weight, type);
    return conversion;
  }

  // "nf4", "bf16" ...; "keep" to leave it as it is, which `why` says unless it is empty.
  std::string type_of(const Weight& weight, std::string_view why) {
    for (const TypeRule& rule : rules_) {
      if (rule.pattern.matches(weight.name)) return rule.type;
    }
    if (any_matches(exclude_, weight.name)) return "keep";
    if (why.empty()) return options_.to;
    const bool matrix = weight.shape.size() >= 2 && why != "not a float";
    if (matrix && any_matches(include_, weight.name)) return options_.to;
    if (why == "expert" || (weight.shape.size() == 3 && matrix)) ++experts_;
    return "keep";
  }

  void check_source(const Weight& weight, const std::string& type) const {
    const std::string where =
        weight.parts.front().tensor.file->path().string() + ": weight " + printable(weight.name);
    if (!weight.is_readable()) {
      throw Error(where + ": cannot make " + type + " of " + std::string(weight.format));
    }
    if (weight.is_packed() && !options_.requantize) {
      throw Error(where + ": is already " + std::string(weight.format) +
                  "; --requantize decodes it and quantises it again, with a second loss");
    }
  }

  const Options& options_;
  std::vector<Pattern> include_, exclude_;
  std::vector<TypeRule> rules_;
  std::uint64_t experts_ = 0;
};

// The stacks that are quantised as a whole, and the weights of the checkpoint that are left.
struct Chosen {
  std::vector<Conversion> conversions;
  std::set<const Weight*> done;
};

Chosen choose_stacks(const ExpertStacks& experts, Chooser& chooser, const Options& options,
                     bool gpt_oss) {
  if (options.experts == "stack" && !experts.refused.empty()) {
    const auto& [name, why] = *experts.refused.begin();
    throw Error(options.folder.from + ": experts " + printable(name) + " cannot be stacked: " +
                why + "; --experts separate or keep takes them as they are");
  }
  std::map<std::string_view, const Weight*> by_name;
  for (const Weight* member : experts.members) by_name.emplace(member->name, member);
  Chosen chosen;
  for (const Weight& stack : experts.stacks) {
    const bool stored_so =
        is_expert_stack(stack) && (!stack.composed || stack.composed->transposed);
    if (!stored_so && options.experts != "stack") continue;
    std::optional<Conversion> conversion = chooser.choose_stack(stack);
    if (!conversion) continue;
    if (gpt_oss && conversion->format == Format::kMxfp4) conversion->stack = Stack::kGptOss;
    chosen.conversions.push_back(*conversion);
    for (const std::string& name : member_names(stack)) chosen.done.insert(by_name.at(name));
  }
  return chosen;
}

// What would stay packed beside the new format must be a weight that its loader knows.
void check_kept(const Weight& weight, Format format, const Options& options) {
  const bool of_producer = weight.quant_method == producer_of(format) ||
                           weight.quant_method == "Monograph" ||
                           weight.quant_method == "transformers";
  // One config says how wide groups are and whether they have zero points.
  const bool groups = find_format(format)->shape == BlockShape::kGroup;
  const bool fits = of_producer && !groups &&
                    (weight.format == options.to || weight.quant_method == "bitsandbytes");
  if (!weight.is_packed() || fits) return;
  throw Error(options.folder.from + ": weight " + printable(weight.name) + " would stay " +
              std::string(weight.format) + " beside " + options.to +
              "; no loader knows such a mixture");
}

void note_calibrated(const Calibration& calibration, const std::vector<Conversion>& conversions,
                     std::vector<std::string>& notes) {
  std::size_t known = 0, unknown = 0;
  for (const Conversion& conversion : conversions) {
    if (conversion.action != Action::kQuantize) continue;
    ++(inputs_of(conversion, calibration) != nullptr ? known : unknown);
  }
  if (known == 0) {
    throw Error(calibration.file().string() + ": has the inputs of none of the " +
                std::to_string(unknown) + " weights to quantise");
  }
  if (unknown == 0) return;
  notes.push_back(calibration.file().string() + " has no inputs of " + std::to_string(unknown) +
                  " of " + std::to_string(known + unknown) +
                  " weights: they are rounded to the nearest");
}

int quantize_folder(const Options& options, const Session& session) {
  const Format format = *written_format(options.to);
  block_size(format, options.block);
  check_double_quant(format, options.double_quant);
  zero_point_rule(format, options.asymmetric);
  if (!options.compute_dtype.empty() && !find_format(format)->double_quant) {
    throw UsageError("--compute-dtype",
                     "is not for " + options.to + ": bitsandbytes' config has it, for nf4 and fp4");
  }
  if (!options.calibration.empty() && options.nonfinite == "saturate") {
    throw UsageError("--nonfinite",
                     "'saturate' is not for --calibration: an infinity "
                     "has no error to feed back");
  }
  const Model model = open_model(options.folder.from);
  refuse_transforms(model);
  if (model.config) check_orientation(*model.config);
  const ExpertStacks experts =
      stack_experts(model.weights, model.config ? *model.config : json::Value::object());
  Chooser chooser(options);
  const bool gpt_oss = model.config && is_gpt_oss(*model.config);
  Chosen chosen = choose_stacks(experts, chooser, options, gpt_oss);
  // As OpenAI ships it, gpt-oss in MXFP4 has packed experts and 16-bit linear layers.
  const bool experts_alone =
      std::any_of(chosen.conversions.begin(), chosen.conversions.end(),
                  [](const Conversion& conversion) { return conversion.stack == Stack::kGptOss; });
  std::vector<Conversion>& conversions = chosen.conversions;
  bool any = !conversions.empty();
  for (const Weight& weight : model.weights) {
    if (chosen.done.contains(&weight)) continue;
    Conversion conversion = chooser.choose(weight);
    if (experts_alone && conversion.action == Action::kQuantize && skip_reason(weight).empty() &&
        !chooser.names(weight)) {
      conversion = {.weight = &weight};
    }
    if (conversion.action == Action::kCopy) check_kept(weight, format, options);
    any |= conversion.action == Action::kQuantize;
    conversions.push_back(conversion);
  }
  if (!any) throw Error(options.folder.from + ": no weight was chosen to be quantised");
  std::vector<std::string> notes;
  if (experts_alone) {
    notes.push_back("linear layers stay as they are beside the experts, as gpt-oss is shipped");
  }
  const bool stacked =
      std::any_of(conversions.begin(), conversions.end(),
                  [](const Conversion& conversion) { return conversion.stack == Stack::kOwn; });
  if (stacked) {
    notes.push_back(
        "load the stacked experts with Monograph; transformers alone does not know them and "
        "starts such experts at random, with no more than a report");
  }
  if (chooser.experts() != 0) {
    notes.push_back(std::to_string(chooser.experts()) +
                    " expert weights stay as they are, for transformers cannot load them packed: "
                    "--experts stack quantises them for Monograph");
  }
  std::optional<json::Value> config = model.config;
  if (config) {
    const bool made = std::any_of(
        conversions.begin(), conversions.end(),
        [](const Conversion& conversion) { return conversion.action == Action::kQuantize; });
    const json::Value* old = config->find("quantization_config");
    if (!made && old == nullptr) {
      throw Error(
          options.folder.from +
          ": config.json has no quantization_config for the experts that are packed already");
    }
    json::Value quantization =
        made ? quantization_config(*config, conversions, find_dtype(options.compute_dtype)) : *old;
    if (!made) quantization.set("monograph_experts", json::Value::string("stacked"));
    config->set("quantization_config", std::move(quantization));
  }
  std::unique_ptr<Calibration> calibration;
  if (!options.calibration.empty()) {
    calibration = std::make_unique<Calibration>(options.calibration);
    note_calibrated(*calibration, conversions, notes);
  }
  return convert_folder("quantize", model, std::move(conversions), config, options.folder, session,
                        calibration.get(), notes);
}

Run declare(CommandLine& line) {
  auto options = std::make_shared<Options>();
  declare_folder_options(line, options->folder);
  line.add_option("--to", options->to,
                  "Format: nf4, fp4, mxfp4, mxfp8, nvfp4, fp8-block, int4, int8 or fp8")
      .one_of(written_names())
      .type_name("FORMAT")
      .shows_default();
  line.add_option("--block-size", options->block,
                  "Weights that share a scale: of nf4 and fp4, and of int4 and int8 (0: a row)")
      .option_text("N [64; int4 128, int8 0]");
  line.add_flag("--asymmetric", options->asymmetric,
                "A zero point beside each scale (int4 and int8)");
  line.add_flag("--double-quant", options->double_quant, "Quantise the scales too (nf4 and fp4)");
  line.add_option(
          "--experts", options->experts,
          "Experts of a mixture: 'stack' them into one packed weight a projection, quantise "
          "them as they are stored ('separate') or 'keep' them")
      .one_of({"stack", "separate", "keep"})
      .type_name("HOW")
      .shows_default();
  line.add_option("--include", options->include,
                  "Also quantise matrices whose name matches (repeatable)")
      .type_name("REGEX")
      .repeatable();
  line.add_option("--exclude", options->exclude, "Leave weights whose name matches (repeatable)")
      .type_name("REGEX")
      .repeatable();
  line.add_option(
          "--tensor-type", options->tensor_types,
          "Type of weights whose name matches: a format, bf16, fp16, fp32 or keep; the first "
          "match counts and goes before --include and --exclude (repeatable)")
      .type_name("REGEX=TYPE")
      .repeatable();
  line.add_option("--compute-dtype", options->compute_dtype,
                  "bnb_4bit_compute_dtype in config.json; default: the dtype of the model")
      .one_of({"bf16", "fp16", "fp32"})
      .type_name("DTYPE");
  line.add_option("--nonfinite", options->nonfinite,
                  "A NaN or an infinity: 'error' names it, 'saturate' stores the nearest code")
      .one_of({"error", "saturate"})
      .type_name("RULE")
      .shows_default();
  line.add_option(
          "--calibration", options->calibration,
          "The inputs of the linear layers (calibration.safetensors): codes are chosen with "
          "error feedback along them, not to the nearest")
      .type_name("FILE");
  line.add_flag("--requantize", options->requantize, "Accept weights that are quantised already");
  return [options](Session& session) { return quantize_folder(*options, session); };
}

}  // namespace

const Command kQuantize = {
    "quantize",
    "a model folder to NF4, FP4, MXFP4, MXFP8, NVFP4, FP8, INT4 or INT8",
    "Quantise the linear layers of a model folder and write config.json so that transformers and "
    "Monograph load the result. nf4 and fp4 are stored as bitsandbytes does, mxfp4, mxfp8 and "
    "nvfp4 as compressed-tensors does, so are int4 (W4A16), int8 (W8A16) and fp8 (a scale for each "
    "row), fp8-block (128 x 128) as DeepSeek and Qwen do. Tokenizer "
    "and other files are carried over.\n\n"
    "Embeddings, the output head, routers, norms and biases stay as they are; experts do too, "
    "unless --experts says otherwise. 'stack' makes one packed weight [experts, outputs, inputs] "
    "of "
    "each projection, which Monograph maps; gpt-oss in mxfp4 is written as OpenAI ships it. The "
    "source is streamed, so memory does not grow with the model. The new folder "
    "appears "
    "complete or not at all.",
    "monograph quantize my-llama my-llama-nf4 --double-quant\n"
    "monograph quantize my-llama my-llama-fp8 --to fp8-block\n"
    "monograph quantize my-llama my-llama-fp4 --to fp4 --exclude 'layers\\.(0|1)\\.' --dry-run\n"
    "monograph quantize my-moe my-moe-nf4 --experts stack\n"
    "monograph quantize my-moe my-moe-nf4 --experts separate --tensor-type 'down_proj=keep'",
    declare,
};

}  // namespace monograph::cli
