// monograph convert: a GPTQ, AWQ or AutoRound folder in the layout that is trained as it lies.
#include <filesystem>
#include <memory>

#include "convert_folder.h"
#include "monograph/base/error.h"
#include "monograph/convert/turn_words.h"
#include "monograph/quant_methods/skip_reason.h"
#include "monograph/quant_methods/turned_config.h"

namespace monograph::cli {
namespace {

bool has_words(const Weight& weight) {
  return weight.quant_method == "GPTQ" || weight.quant_method == "AWQ";
}

// A part that belongs to no weight whose other parts were found would be copied as it is, and lost.
void check_whole(const Weight& weight) {
  for (const char* ending : {".qweight", ".qzeros", ".g_idx"}) {
    if (!weight.name.ends_with(ending)) continue;
    throw Error(weight.parts.front().tensor.file->path().string() + ": tensor " +
                printable(weight.name) + " (" + std::string(weight.format) +
                "): its weight lacks a part; wanted qweight and qzeros of I32 beside scales");
  }
}

// What a loader of compressed-tensors would not look for: its target is Linear.
void check_linear(const Weight& weight) {
  if (skip_reason(weight) != "embedding") return;
  throw Error("weight " + printable(weight.name) + ": an embedding in " +
              std::string(weight.format) + " is not supported, wanted linear layers alone");
}

// Old folders say the version of their zero points in quantize_config.json too.
void check_other_config(const std::filesystem::path& folder, const json::Value& config) {
  const std::filesystem::path path = folder / "quantize_config.json";
  const json::Value* settings = config.find("quantization_config");
  if (!std::filesystem::exists(path) || settings == nullptr) return;
  const json::Value other = read_json(path);
  const auto version_in = [](const json::Value& from) -> std::string {
    for (const char* key : {"checkpoint_format", "format"}) {
      const json::Value* found = from.is(json::Kind::kObject) ? from.find(key) : nullptr;
      if (found != nullptr && found->as_string()) return std::string(*found->as_string());
    }
    return "gptq";
  };
  const std::string here = version_in(*settings), there = version_in(other);
  if (here == there || settings->find("quant_method") == nullptr ||
      settings->find("quant_method")->as_string() != "gptq") {
    return;
  }
  throw Error(path.string() + ": checkpoint_format is '" + printable(there) +
              "', and config.json means '" + printable(here) + "'");
}

int convert_words(const FolderOptions& options, const Session& session) {
  const Model model = open_model(options.from);
  refuse_transforms(model);
  if (!model.config) throw Error(options.from + ": has no config.json, wanted a model folder");
  check_orientation(*model.config);
  check_other_config(model.folder, *model.config);
  std::vector<Conversion> conversions;
  bool symmetric = true, any = false, columns = false;
  for (const Weight& weight : model.weights) {
    if (!has_words(weight)) {
      conversions.push_back({.weight = &weight});
      continue;
    }
    any = true;
    check_linear(weight);
    const WordLayout words = words_of(weight, *model.config);
    conversions.push_back({.weight = &weight, .action = Action::kTurn, .words = words});
    // One setting for all weights, so each is looked at.
    const bool middle = zeros_are_middle(weight, words);
    if (!middle && says_symmetric(&*model.config)) {
      throw Error("weight " + printable(weight.name) +
                  ": quantization_config says symmetric, and a zero point is not the middle code; "
                  "is checkpoint_format right?");
    }
    symmetric &= middle;
    columns |= !words.columns.empty();
  }
  if (!any) {
    throw Error(options.from +
                ": holds no GPTQ, AWQ or AutoRound weight (X.qweight, X.qzeros, "
                "X.scales)");
  }
  for (Conversion& conversion : conversions) {
    if (conversion.action == Action::kCopy) check_whole(*conversion.weight);
    conversion.symmetric = symmetric;
    conversion.writes_columns = columns;
  }
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
    "Where g_idx scatters the columns of a group (desc_act), they are sorted by group, and "
    "X.weight_columns says where each belongs. compressed-tensors has no name for it, so such a "
    "folder has quant_method monograph, which other programs refuse.\n\n"
    "Refused by name: groups of several sizes, 2 and 3 bits, AWQ other than gemm, layers of "
    "several schemes, and zero points of GPTQ's first version that two programs read differently.",
    "monograph convert my-llama-gptq my-llama-int4\n"
    "monograph convert my-llama-awq my-llama-int4 --dry-run",
    declare,
};

}  // namespace monograph::cli
