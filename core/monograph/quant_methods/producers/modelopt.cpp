// ModelOpt: X.weight, X.weight_scale, X.weight_scale_2. Read only.
#include <array>

#include "monograph/quant_methods/quant_method.h"
#include "monograph/quant_methods/shared_layouts.h"

namespace monograph {
namespace {

using safetensors::StoredDType;

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
};

}  // namespace

namespace producers {

const QuantMethod& modelopt() {
  static constexpr QuantMethod kMethod = {.name = "ModelOpt", .stored = kStored};
  return kMethod;
}

}  // namespace producers
}  // namespace monograph
