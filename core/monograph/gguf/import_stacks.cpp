// Experts as transformers' gpt-oss has them: all of a layer in one tensor, inputs for rows, gate
// and up in turns.
#include <algorithm>
#include <map>

#include "monograph/base/error.h"
#include "monograph/gguf/import.h"
#include "monograph/safetensors/plan.h"
#include "monograph/text/utf8.h"

namespace monograph::gguf {
namespace {

using text::in_quotes;

// Of one layer, by the end of their names.
using Parts = std::map<std::string, const TensorInfo*>;

const TensorInfo& part(const FileReader& file, const Parts& parts, const std::string& layer,
                       const std::string& end) {
  const auto found = parts.find(end);
  if (found == parts.end())
    throw Error(file.path().string() + ": " + in_quotes(layer + ".experts") + ": has no " + end);
  return *found->second;
}

// One tensor of a layer, [experts, outputs, inputs] or a bias, and `odd` for the outputs between.
ImportedTensor stack(const FileReader& file, const TensorInfo& info, const TensorInfo* odd,
                     std::string name) {
  if (odd != nullptr && odd->shape != info.shape) {
    throw Error(file.path().string() + ": tensors " + in_quotes(info.name) + " and " +
                in_quotes(odd->name) + " are " + safetensors::shape_text(info.shape) + " and " +
                safetensors::shape_text(odd->shape) + ", wanted one shape");
  }
  ImportedTensor tensor;
  tensor.info = &info;
  tensor.odd = odd;
  tensor.name = std::move(name);
  tensor.shape = info.shape;
  tensor.shape[1] *= odd == nullptr ? 1 : 2;
  tensor.stacked = true;
  if (tensor.shape.size() == 3) std::swap(tensor.shape[1], tensor.shape[2]);
  return tensor;
}

}  // namespace

ImportPlan with_stacks_in_turns(const FileReader& file, ImportPlan plan) {
  constexpr std::string_view kExperts = ".experts.";
  std::map<std::string, Parts> layers;
  std::vector<ImportedTensor> tensors;
  for (ImportedTensor& tensor : plan.tensors) {
    const std::size_t at = tensor.name.rfind(kExperts);
    if (at == std::string::npos) {
      tensors.push_back(std::move(tensor));
      continue;
    }
    const std::string rest = tensor.name.substr(at + kExperts.size());
    layers[tensor.name.substr(0, at)][rest.substr(rest.find('.') + 1)] = tensor.info;
  }
  for (const auto& entry : layers) {
    const auto& [layer, parts] = entry;
    const std::string experts = layer + ".experts.";
    for (const auto& [kind, end] : {std::pair(".weight", ""), std::pair(".bias", "_bias")}) {
      if (parts.find("down_proj" + std::string(kind)) == parts.end()) continue;
      // clang 14 captures no structured binding by reference.
      const auto of = [&file, &entry,
                       ending = std::string(kind)](const char* name) -> const TensorInfo& {
        return part(file, entry.second, entry.first, name + ending);
      };
      tensors.push_back(
          stack(file, of("gate_proj"), &of("up_proj"), experts + "gate_up_proj" + end));
      tensors.push_back(stack(file, of("down_proj"), nullptr, experts + "down_proj" + end));
    }
  }
  plan.tensors = std::move(tensors);
  return plan;
}

}  // namespace monograph::gguf
