// monograph convert: a GPTQ, AWQ or AutoRound folder in the layout that is trained as it lies.
#include <algorithm>
#include <memory>

#include "convert_folder.h"
#include "monograph/base/error.h"
#include "monograph/convert/turn_words.h"
#include "monograph/quant_methods/turned_config.h"

namespace monograph::cli {
namespace {

bool has_words(const Weight& weight) {
  return weight.quant_method == "GPTQ" || weight.quant_method == "AWQ";
}

Conversion turn(const Weight& weight, const json::Value& config) {
  Weight copy = weight;
  const Candidate found(&config, copy);
  std::string why;
  const auto layout = word_layout(found, why);
  if (!layout) found.fail(why);
  return {.weight = &weight, .action = Action::kTurn, .words = layout};
}

int convert_words(const FolderOptions& options, const Session& session) {
  const Model model = open_model(options.from);
  if (!model.config) throw Error(options.from + ": has no config.json, wanted a model folder");
  std::vector<Conversion> conversions;
  bool symmetric = true, any = false;
  for (const Weight& weight : model.weights) {
    if (!has_words(weight)) {
      conversions.push_back({.weight = &weight});
      continue;
    }
    any = true;
    conversions.push_back(turn(weight, *model.config));
    // One setting for all weights, so each is looked at.
    symmetric &= zeros_are_middle(weight, *conversions.back().words);
  }
  if (!any) {
    throw Error(options.from +
                ": holds no GPTQ, AWQ or AutoRound weight (X.qweight, X.qzeros, "
                "X.scales)");
  }
  for (Conversion& conversion : conversions) conversion.symmetric = symmetric;
  json::Value config = *model.config;
  config.set("quantization_config", turned_config(conversions));
  return convert_folder("convert", model, std::move(conversions), config, options, session);
}

Run declare(CommandLine& line) {
  auto options = std::make_shared<FolderOptions>();
  declare_folder_options(line, *options);
  return [options](Session& session) { return convert_words(*options, session); };
}

}  // namespace

const Command kConvert = {
    "convert",
    "a GPTQ, AWQ or AutoRound folder in the layout of compressed-tensors",
    "Turn the words of a GPTQ, AWQ or AutoRound checkpoint into the rows of compressed-tensors "
    "(pack-quantized), which are trained as they lie. Codes, zero points and scales stay the same, "
    "so the weight has the same values; nothing is quantised again. Other tensors are copied.\n\n"
    "Refused by name: columns out of order (desc_act with g_idx), 2 and 3 bits, AWQ other than "
    "gemm, "
    "layers of several schemes, and zero points of GPTQ's first version that two programs read "
    "differently.",
    "monograph convert my-llama-gptq my-llama-int4\n"
    "monograph convert my-llama-awq my-llama-int4 --dry-run",
    declare,
};

}  // namespace monograph::cli
