// FP8 as DeepSeek ships it, which transformers calls fp8: X.weight, X.weight_scale_inv.
#include <array>

#include "monograph/quant_methods/quant_method.h"
#include "monograph/quant_methods/quantization_config.h"
#include "monograph/quant_methods/shared_layouts.h"

namespace monograph {
namespace {

using json::Value;
using safetensors::StoredDType;

constexpr std::array kStored = {
    StoredForm{"mxfp4",
               ".weight",
               ".weight",
               {{{".weight_scale_inv", "scale", true}}},
               [](const Candidate& found) {
                 return found.values_are(StoredDType::kI8) && found.scale_is_e8m0();
               },
               describe_mxfp4},
    StoredForm{"fp8-block",
               ".weight",
               ".weight",
               {{{".weight_scale_inv", "scale", true}, {".input_scale", "input_scale"}}},
               [](const Candidate& found) { return found.values_are(StoredDType::kF8E4M3); },
               describe_fp8},
};

constexpr std::array kWritten = {WrittenForm{.name = "fp8-block",
                                             .format = Format::kFp8Block,
                                             .values = ".weight",
                                             .scales = ".weight_scale_inv",
                                             .values_type = StoredDType::kF8E4M3,
                                             .scales_type = StoredDType::kF32}};

Value config_of(const ConfigRequest& request) {
  Value value = Value::object();
  value.set("quant_method", Value::string("fp8"));
  value.set("fmt", Value::string("e4m3"));
  value.set("activation_scheme", Value::string("dynamic"));
  Value sizes = Value::array();
  for (int i = 0; i < 2; ++i)
    sizes.append(Value::number(static_cast<std::int64_t>(request.first->block)));
  value.set("weight_block_size", std::move(sizes));
  value.set("modules_to_not_convert", skipped_modules(request.conversions));
  return value;
}

}  // namespace

namespace producers {

const QuantMethod& deepseek() {
  static constexpr QuantMethod kMethod = {
      .name = "DeepSeek", .stored = kStored, .written = kWritten, .config = config_of};
  return kMethod;
}

}  // namespace producers
}  // namespace monograph
