// ModelOpt: X.weight, X.weight_scale, in NVFP4 X.weight_scale_2. Read only.
#include <array>

#include "monograph/quant_methods/quant_method.h"
#include "monograph/quant_methods/shared_layouts.h"

namespace monograph {
namespace {

using safetensors::StoredDType;

// FP8 has the names of compressed-tensors, but fp32 scales beside a weight that was of 16 bits.
bool is_folder_of_modelopt(const Candidate& found) {
  const json::Value* config = found.config();
  const json::Value* quantization = config ? config->find("quantization_config") : nullptr;
  const json::Value* method = quantization && quantization->is(json::Kind::kObject)
                                  ? quantization->find("quant_method")
                                  : nullptr;
  return method != nullptr && method->as_string().value_or("").starts_with("modelopt");
}

constexpr std::array kStored = {
    StoredForm{"nvfp4",
               ".weight",
               ".weight",
               {{{".weight_scale", "scale", true},
                 {".weight_scale_2", "global_scale", true},
                 {".input_scale", "input_scale"}}},
               [](const Candidate& found) {
                 return found.values_are(StoredDType::kU8) &&
                        found.dtype_of("scale") == StoredDType::kF8E4M3;
               },
               [](const Candidate& found) { describe_nvfp4(found, Format::kNvfp4); }},
    StoredForm{"fp8",
               ".weight",
               ".weight",
               {{{".weight_scale", "scale", true}, {".input_scale", "input_scale"}}},
               [](const Candidate& found) {
                 return found.values_are(StoredDType::kF8E4M3) && is_folder_of_modelopt(found);
               },
               describe_fp8},
};

}  // namespace

namespace producers {

const QuantMethod& modelopt() {
  static constexpr QuantMethod kMethod = {.name = "ModelOpt", .stored = kStored};
  return kMethod;
}

}  // namespace producers
}  // namespace monograph
