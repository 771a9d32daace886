// monograph quantize: a model folder to a packed format, as the format's producers write it.
#include <memory>

#include "block_size.h"
#include "convert_folder.h"
#include "monograph/base/error.h"
#include "monograph/convert/packed_parts.h"
#include "monograph/convert/quantization_config.h"
#include "monograph/convert/why_kept.h"
#include "pattern.h"

namespace monograph::cli {
namespace {

struct Options {
  FolderOptions folder;
  std::string to = "nf4", nonfinite = "error", compute_dtype;
  std::optional<std::size_t> block;
  bool double_quant = false, requantize = false;
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
      throw CLI::ValidationError(
          "--tensor-type '" + text +
          "': wanted REGEX=nf4|fp4|mxfp4|mxfp8|nvfp4|fp8-block|bf16|fp16|fp32|keep");
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
    Conversion conversion;
    conversion.weight = &weight;
    conversion.nonfinite =
        options_.nonfinite == "saturate" ? NonFinite::kSaturate : NonFinite::kError;
    const std::string type = type_of(weight);
    if (const auto format = written_format(type)) {
      conversion.action = Action::kQuantize;
      conversion.format = *format;
      conversion.block = block_size(*format, options_.block);
      conversion.double_quant = options_.double_quant && find_format(*format)->double_quant;
    } else if (const auto dtype = find_dtype(type)) {
      conversion.action = weight.format == type ? Action::kCopy : Action::kCast;
      conversion.dtype = *dtype;
    }
    if (conversion.action != Action::kCopy) check_source(weight, type);
    return conversion;
  }
  std::uint64_t experts() const { return experts_; }

 private:
  // "nf4", "bf16" ...; "keep" to leave it as it is.
  std::string type_of(const Weight& weight) {
    for (const TypeRule& rule : rules_) {
      if (rule.pattern.matches(weight.name)) return rule.type;
    }
    if (any_matches(exclude_, weight.name)) return "keep";
    const std::string_view why = why_kept(weight);
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

int quantize_folder(const Options& options, const Session& session) {
  const Format format = *written_format(options.to);
  block_size(format, options.block);
  check_double_quant(format, options.double_quant);
  const Model model = open_model(options.folder.from);
  if (model.config) check_orientation(*model.config);
  Chooser chooser(options);
  std::vector<Conversion> conversions;
  bool any = false;
  for (const Weight& weight : model.weights) {
    conversions.push_back(chooser.choose(weight));
    const bool kept = conversions.back().action == Action::kCopy;
    any |= conversions.back().action == Action::kQuantize;
    const bool fits = weight.spelling == producer_of(format) &&
                      (weight.format == options.to || weight.spelling == "bitsandbytes");
    if (kept && weight.is_packed() && !fits) {
      throw Error(options.folder.from + ": weight " + printable(weight.name) + " would stay " +
                  std::string(weight.format) + " beside " + options.to +
                  "; no loader knows such a mixture");
    }
  }
  if (!any) throw Error(options.folder.from + ": no weight was chosen to be quantised");
  if (chooser.experts() != 0) {
    session.note("note: " + std::to_string(chooser.experts()) +
                 " expert weights stay as they are; transformers cannot load them packed: "
                 "--include experts quantises them all the same");
  }
  std::optional<json::Value> config = model.config;
  if (config) {
    config->set("quantization_config",
                quantization_config(*config, conversions, find_dtype(options.compute_dtype)));
  }
  return convert_folder("quantize", model, std::move(conversions), config, options.folder, session);
}

Run declare(CLI::App& app) {
  auto options = std::make_shared<Options>();
  declare_folder_options(app, options->folder);
  app.add_option("--to", options->to, "Format: nf4, fp4, mxfp4, mxfp8, nvfp4 or fp8-block")
      ->check(CLI::IsMember(written_names()))
      ->type_name("FORMAT")
      ->capture_default_str();
  app.add_option("--block-size", options->block, "Weights that share a scale (nf4 and fp4)")
      ->option_text("N [64]");
  app.add_flag("--double-quant", options->double_quant, "Quantise the scales too (nf4 and fp4)");
  app.add_option("--include", options->include,
                 "Also quantise matrices whose name matches (repeatable)")
      ->type_name("REGEX")
      ->allow_extra_args(false);
  app.add_option("--exclude", options->exclude, "Leave weights whose name matches (repeatable)")
      ->type_name("REGEX")
      ->allow_extra_args(false);
  app.add_option(
         "--tensor-type", options->tensor_types,
         "Type of weights whose name matches: a format, bf16, fp16, fp32 or keep; the first "
         "match counts and goes before --include and --exclude (repeatable)")
      ->type_name("REGEX=TYPE")
      ->allow_extra_args(false);
  app.add_option("--compute-dtype", options->compute_dtype,
                 "bnb_4bit_compute_dtype in config.json; default: the dtype of the model")
      ->check(CLI::IsMember({"bf16", "fp16", "fp32"}))
      ->type_name("DTYPE");
  app.add_option("--nonfinite", options->nonfinite,
                 "A NaN or an infinity: 'error' names it, 'saturate' stores the nearest code")
      ->check(CLI::IsMember({"error", "saturate"}))
      ->type_name("RULE")
      ->capture_default_str();
  app.add_flag("--requantize", options->requantize, "Accept weights that are quantised already");
  return [options](Session& session) { return quantize_folder(*options, session); };
}

}  // namespace

const Command kQuantize = {
    "quantize",
    "a model folder to NF4, FP4, MXFP4, MXFP8, NVFP4 or FP8 blocks",
    "Quantise the linear layers of a model folder and write config.json so that transformers and "
    "Monograph load the result. nf4 and fp4 are stored as bitsandbytes does, mxfp4, mxfp8 and "
    "nvfp4 as compressed-tensors does, fp8-block (128 x 128) as DeepSeek and Qwen do. Tokenizer "
    "and other files are carried over.\n\n"
    "Embeddings, the output head, routers, norms and biases stay as they are; experts do too, "
    "unless "
    "included. The source is streamed, so memory does not grow with the model. The new folder "
    "appears "
    "complete or not at all.",
    "monograph quantize my-llama my-llama-nf4 --double-quant\n"
    "monograph quantize my-llama my-llama-fp8 --to fp8-block\n"
    "monograph quantize my-llama my-llama-fp4 --to fp4 --exclude 'layers\\.(0|1)\\.' --dry-run\n"
    "monograph quantize my-moe my-moe-nf4 --include 'experts' --tensor-type 'down_proj=keep'",
    declare,
};

}  // namespace monograph::cli
