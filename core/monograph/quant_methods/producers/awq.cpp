// AWQ (AutoAWQ, GPTQModel, AutoRound), gemm: X.qweight, X.qzeros, X.scales, words along the
// outputs.
#include <array>

#include "monograph/quant_methods/quant_method.h"
#include "monograph/quant_methods/word_layouts.h"

namespace monograph {
namespace {

using safetensors::StoredDType;

constexpr std::array kStored = {
    StoredForm{"awq",
               ".qweight",
               ".weight",
               {{{".scales", "scale", true}, {".qzeros", "zero_point", true}}},
               [](const Candidate& found) {
                 return found.values_are(StoredDType::kI32) && says_awq(found.config());
               },
               describe_words},
};

}  // namespace

namespace producers {

const QuantMethod& awq() {
  static constexpr QuantMethod kMethod = {.name = "AWQ", .stored = kStored};
  return kMethod;
}

}  // namespace producers
}  // namespace monograph
