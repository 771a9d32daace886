#include "merge_options.h"

#include <charconv>
#include <cmath>
#include <filesystem>

#include "convert_folder.h"
#include "monograph/quant_methods/packed_parts.h"
#include "monograph/text/utf8.h"
#include "recorded_base.h"

namespace monograph::cli {
namespace {

std::vector<std::string> output_types() {
  std::vector<std::string> types = written_names();
  types.insert(types.begin(), {"same", "bf16", "fp16", "fp32"});
  return types;
}

}  // namespace

GivenAdapter parse_adapter(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  std::error_code ignored;
  if (colon == std::string::npos || std::filesystem::is_directory(text, ignored)) return {text};
  GivenAdapter given{text.substr(0, colon)};
  const char *begin = text.data() + colon + 1, *end = text.data() + text.size();
  const auto [last, error] = std::from_chars(begin, end, given.weight);
  if (error != std::errc() || last != end || !std::isfinite(given.weight)) {
    throw UsageError("--adapter", text::in_quotes(text) + ": after ':' a number is wanted");
  }
  return given;
}

void check_given(MergeOptions& options) {
  if (!options.base_model.empty() && !options.base.empty()) {
    throw UsageError("--base-model", "and " + text::in_quotes(options.base) + " are both given");
  }
  if (options.base.empty()) options.base = options.base_model;
  if (options.base.empty()) {
    throw UsageError(
        "the base is missing, wanted its folder with --adapter DIR and --out DIR, "
        "or a recipe: monograph merge CONFIG.yml");
  }
  if (options.adapters.empty()) {
    throw UsageError("--adapter is missing: " + text::in_quotes(options.base) +
                     " is neither CONFIG.yml nor the output_dir of a finished run; wanted one of "
                     "them, or the folder of a base with --adapter DIR");
  }
  if (options.out.empty()) throw UsageError("--out", "is missing, wanted a folder");
}

void declare_merge(CommandLine& line, MergeOptions& options) {
  line.add_option("base", options.base,
                  "The folder of the base model or its GGUF file; or a recipe, or the folder of "
                  "the adapter that it "
                  "made, and nothing else is needed (Python)");
  line.add_option("--base-model", options.base_model, "The base, as an option").type_name("DIR");
  line.add_option("--adapter", options.adapters,
                  "A PEFT adapter folder, with a weight if it is not 1 (repeatable)")
      .type_name("DIR[:WEIGHT]")
      .repeatable();
  line.add_option(
          "--base", options.base_weights,
          "Which weights the adapter was trained on: 'original' (16 or 32 bits), or "
          "'dequantized', the values of a quantised checkpoint; required unless the adapter "
          "records it")
      .one_of({"original", "dequantized"});
  line.add_option("--out", options.out,
                  "The folder to write; of a base in GGUF the file, which ends in .gguf");
  line.add_option("--as", options.as,
                  "With --base dequantized and a base that is not quantised: the format it was "
                  "loaded in for training; the adapter of a recipe records it")
      .one_of(written_names())
      .type_name("FORMAT");
  line.add_option("--as-block-size", options.as_block,
                  "Block size of --as nf4, fp4, int4 or int8 (0: the row)")
      .option_text("N [64; int4 128, int8 0]");
  line.add_flag("--as-asymmetric", options.as_asymmetric, "--as int4 or int8 with zero points");
  line.add_flag("--as-double-quant", options.as_double_quant, "--as with quantised scales");
  line.add_option("--as-experts", options.as_experts,
                  "With --as: whether the experts of a mixture were 'packed' too, or 'plain'; "
                  "needed where an adapter changes them")
      .one_of({"packed", "plain"})
      .type_name("HOW");
  line.add_option(
          "--to", options.to,
          "Type of the output. 'same': that of the base, or of the weights it was quantised "
          "from; bf16, fp16, fp32; or a packed format for the linear layers: nf4, fp4, mxfp4, "
          "mxfp8, nvfp4, fp8-block, int4, int8, fp8")
      .one_of(output_types())
      .type_name("TYPE")
      .shows_default();
  line.add_option("--block-size", options.block,
                  "Block size of --to nf4, fp4, int4 or int8 (0: the row); of int4 and int8 by "
                  "default, with or without zero points, as a base of that format has it")
      .option_text("N [64; int4 128, int8 0]");
  line.add_flag("--asymmetric", options.asymmetric, "--to int4 or int8 with zero points");
  line.add_flag("--double-quant", options.double_quant, "--to nf4 or fp4 with quantised scales");
  line.add_option(
          "--experts", options.experts,
          "Plain experts in a packed output: 'stack' them, quantise them as they are stored "
          "('separate') or 'keep' them; those that are packed in the base are packed")
      .one_of({"stack", "separate", "keep"})
      .type_name("HOW")
      .shows_default();
  declare_rounding(line, options.rounding);
  line.add_option("--warn-below", options.warn_below,
                  "Warn about weights that keep a smaller share of the trained change")
      .finite()
      .shows_default();
  line.add_option("--warn-above", options.warn_above,
                  "Warn about weights whose error along the adapter, relative to its change, is "
                  "larger")
      .finite()
      .shows_default();
  line.add_option("--fail-below", options.fail_below,
                  "Write nothing and exit with 1 if a weight keeps a smaller share")
      .finite();
  line.add_option("--fail-above", options.fail_above,
                  "Write nothing and exit with 1 if a weight has a larger error along the adapter")
      .finite();
  declare_another_base(line, options.another_base);
  line.add_flag("--force", options.force, "--another-base, and replace --out if it exists");
  line.add_option("--max-shard-size", options.max_shard_bytes, "Start a new file above this size")
      .bytes()
      .shows_default("5GB");
  declare_jobs(line, options.jobs);
  line.add_flag("--dry-run", options.dry_run,
                "Check everything but the thresholds, which need the merge; write nothing");
  line.add_flag("--all", options.all, "Report every changed weight, not the 10 worst");
  line.add_flag("--json", options.json, "Print the report as JSON");
}

}  // namespace monograph::cli
