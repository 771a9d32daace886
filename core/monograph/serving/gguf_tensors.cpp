#include "monograph/serving/gguf_tensors.h"

#include "monograph/base/error.h"
#include "monograph/serving/gguf_names.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

using text::in_quotes;

std::uint64_t number_of_experts(const BaseModules& base, const ServedPair& pair) {
  const std::optional<ExpertName> expert = parse_expert_name(pair.module + ".weight");
  const auto stacks = expert ? base.stacks_of(expert->module) : std::vector<BaseStack>();
  return stacks.empty() ? 0 : stacks.front().stack->shape[0];
}

}  // namespace

std::map<std::string, GgufTensor> gguf_tensors(const ServingForm& form, const BaseModules& base) {
  std::map<std::string, GgufTensor> tensors;
  for (const ServedPair& pair : form.pairs()) {
    const std::optional<ExpertName> expert = parse_expert_name(pair.module + ".weight");
    const auto place = gguf_place(base, pair.module, expert ? expert->projection : "");
    if (!place)
      throw Error("module " + in_quotes(pair.module) + ": llama.cpp has no tensor for it");
    GgufTensor& tensor = tensors[place->tensor];
    tensor.name = place->tensor;
    tensor.permuted_heads = place->permuted_heads;
    tensor.embedding = pair.embedding;
    tensor.experts = expert ? number_of_experts(base, pair) : 0;
    if (expert && expert->expert >= tensor.experts) {
      throw Error("module " + in_quotes(pair.module) + ": the base has " +
                  std::to_string(tensor.experts) + " experts there that make one stack");
    }
    if (!tensor.pairs.emplace(expert ? expert->expert : 0, &pair).second) {
      throw Error("tensor " + in_quotes(place->tensor) + ": two modules of the adapter are its");
    }
    const std::uint64_t heads = tensor.permuted_heads;
    if (pair.outputs == 0 || pair.inputs == 0) {
      throw Error("module " + in_quotes(pair.module) + ": is " + std::to_string(pair.outputs) +
                  " x " + std::to_string(pair.inputs) + ", wanted no dimension of 0");
    }
    if (heads != 0 && pair.outputs % (2 * heads) != 0) {
      throw Error("module " + in_quotes(pair.module) + ": has " + std::to_string(pair.outputs) +
                  " rows, wanted an even number for each of " + std::to_string(heads) + " heads");
    }
  }
  return tensors;
}

void check_gguf_lora(const ServingForm& form, const BaseModules& base) { gguf_tensors(form, base); }

}  // namespace monograph
