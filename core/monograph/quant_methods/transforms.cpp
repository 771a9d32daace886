#include "monograph/quant_methods/transforms.h"

#include <string>

#include "monograph/base/error.h"

namespace monograph {

void refuse_transforms(const json::Value* config, std::string_view source) {
  const json::Value* quantization =
      config == nullptr ? nullptr : config->find("quantization_config");
  if (quantization == nullptr) return;
  for (const char* key : {"transform_config", "sparsity_config"}) {
    const json::Value* value = quantization->find(key);
    if (value == nullptr || value->members().empty()) continue;
    const json::Value* format = value->find("format");
    if (format != nullptr && format->as_string() == "dense") continue;
    throw Error(std::string(source) + ": quantization_config." + key +
                " is set, wanted none: it changes what a layer computes");
  }
}

}  // namespace monograph
