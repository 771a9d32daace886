// Stacks of experts that transformers packs: P, P_scale_inv. Read only.
#include <array>

#include "monograph/quant_methods/quant_method.h"
#include "monograph/quant_methods/shared_layouts.h"

namespace monograph {
namespace {

using safetensors::StoredDType;

constexpr std::array kStored = {
    StoredForm{"fp8-block",
               "",
               "",
               {{{"_scale_inv", "scale", true}}},
               [](const Candidate& found) {
                 return found.is_stack() && found.values_are(StoredDType::kF8E4M3);
               },
               describe_fp8},
};

}  // namespace

namespace producers {

const QuantMethod& transformers() {
  static constexpr QuantMethod kMethod = {.name = "transformers", .stored = kStored};
  return kMethod;
}

}  // namespace producers
}  // namespace monograph
