// GPTQ (GPTQModel, AutoGPTQ) and AutoRound: X.qweight, X.qzeros, X.scales, X.g_idx, words along the
// inputs.
#include <array>

#include "monograph/quant_methods/quant_method.h"
#include "monograph/quant_methods/word_layouts.h"

namespace monograph {
namespace {

using safetensors::StoredDType;

constexpr std::array kStored = {
    StoredForm{"gptq",
               ".qweight",
               ".weight",
               {{{".scales", "scale", true}, {".qzeros", "zero_point", true}, {".g_idx", "g_idx"}}},
               [](const Candidate& found) {
                 return found.values_are(StoredDType::kI32) && !says_awq(found.config());
               },
               describe_words},
};

}  // namespace

namespace producers {

const QuantMethod& gptq() {
  static constexpr QuantMethod kMethod = {.name = "GPTQ", .stored = kStored};
  return kMethod;
}

}  // namespace producers
}  // namespace monograph
