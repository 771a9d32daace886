// monograph dequantize: a packed model folder back to bf16, fp16 or fp32.
#include <deque>
#include <memory>

#include "convert_folder.h"
#include "gguf_file.h"
#include "monograph/base/error.h"
#include "monograph/weights/experts.h"

namespace monograph::cli {
namespace {

struct Options {
  FolderOptions folder;
  std::string to;
  bool cast_plain = false;
};

// Packed experts have outputs for rows; the 16-bit parameters of some models have inputs.
bool is_transposed(const Weight& weight, const json::Value& config) {
  if (!weight.is_packed() || !is_expert_stack(weight) || !stores_experts_transposed(config)) {
    return false;
  }
  return order_of(weight, config) != StackOrder::kInputsFirst;
}

int dequantize_folder(const Options& options, const Session& session) {
  if (is_gguf(options.folder.from)) {
    return dequantize_gguf(options.folder, find_dtype(options.to).value_or(DType::kBFloat16),
                           session);
  }
  const Model model = open_model(options.folder.from);
  refuse_transforms(model);
  const std::optional<DType> wanted = find_dtype(options.to);
  std::vector<Conversion> conversions;
  std::deque<Weight> transposed_weights;
  bool any = false;
  for (const Weight& weight : model.weights) {
    Conversion conversion;
    conversion.weight = &weight;
    if (model.config && is_transposed(weight, *model.config)) {
      conversion.weight = &transposed_weights.emplace_back(transposed(weight));
    }
    const bool cast = options.cast_plain && weight.is_readable() && weight.format != options.to;
    if (weight.is_packed() || cast) {
      if (!weight.is_readable()) {
        throw Error(weight.parts.front().tensor.file->path().string() + ": weight " +
                    printable(weight.name) + ": cannot decode " + std::string(weight.format) +
                    " (" + std::string(weight.quant_method) + ")");
      }
      conversion.action = Action::kCast;
      conversion.dtype = wanted ? *wanted : float_type(weight.dtype).value_or(DType::kBFloat16);
      any |= weight.is_packed();
    }
    conversions.push_back(conversion);
  }
  if (!any && !options.cast_plain) {
    throw Error(options.folder.from + ": holds no packed weight; --cast-plain casts plain ones");
  }
  std::optional<json::Value> config = model.config;
  if (config) {
    config->erase("quantization_config");
    if (wanted) {
      const bool old_key = config->find("torch_dtype") && !config->find("dtype");
      config->set(old_key ? "torch_dtype" : "dtype", json::Value::string(name_of(*wanted)));
    }
  }
  return convert_folder("dequantize", model, std::move(conversions), config, options.folder,
                        session);
}

Run declare(CommandLine& line) {
  auto options = std::make_shared<Options>();
  declare_folder_options(line, options->folder);
  const Option to =
      line.add_option("--to", options->to,
                      "bf16, fp16 or fp32; default: the type each weight was quantised from")
          .one_of({"bf16", "fp16", "fp32"})
          .type_name("DTYPE");
  line.add_flag("--cast-plain", options->cast_plain, "Cast weights that are not packed too")
      .needs(to);
  return [options](Session& session) { return dequantize_folder(*options, session); };
}

}  // namespace

const Command kDequantize = {
    "dequantize",
    "a packed model folder back to bf16, fp16 or fp32",
    "Decode every packed weight of a model folder and remove quantization_config from config.json. "
    "The values are those of the format's reference, rounded once to the new type; a value that "
    "fp16 "
    "cannot hold is an error. Weights that are not packed stay as they are.\n\n"
    "The weights of a GGUF file become safetensors under transformers' names and in its order of "
    "rows, all of them bf16 or what --to says. config.json and tokenizer.json are made from the "
    "file's "
    "pairs where every one of them is understood; else a line says why not.",
    "monograph dequantize my-llama-nf4 my-llama-bf16\n"
    "monograph dequantize my-llama-nf4 my-llama-fp32 --to fp32 --cast-plain\n"
    "monograph dequantize my-llama-Q4_K_M.gguf my-llama-bf16",
    declare,
};

}  // namespace monograph::cli
