#include "convert/bitsandbytes_config.h"

#include <algorithm>
#include <string>

#include "convert/why_kept.h"

namespace monograph {
namespace {

using json::Value;

// Modules that transformers must not make 4-bit layers of: every matrix that stayed as it was.
// Given a list, transformers does not look for the head itself.
Value skipped_modules(std::span<const Conversion> conversions) {
  Value list = Value::array();
  list.append(Value::string("lm_head"));
  for (const Conversion& conversion : conversions) {
    const Weight& weight = *conversion.weight;
    const std::string_view why = why_kept(weight);
    if (conversion.action == Action::kQuantize || weight.is_packed()) continue;
    if (why == "not a matrix" || why == "not a float" || why == "embedding") continue;
    if (weight.name != "lm_head.weight") list.append(Value::string(module_of(weight.name)));
  }
  return list;
}

std::string name_of_compute(const Value& config, const Conversion* first) {
  for (const std::string_view key : {"dtype", "torch_dtype"}) {
    const Value* value = config.find(key);
    if (value != nullptr && value->as_string()) return std::string(*value->as_string());
  }
  const auto dtype = first == nullptr ? std::nullopt : float_type(first->weight->dtype);
  return name_of(dtype.value_or(DType::kBFloat16));
}

}  // namespace

Value bitsandbytes_config(const Value& config, std::span<const Conversion> conversions,
                          std::optional<DType> compute_dtype) {
  const auto found = std::find_if(
      conversions.begin(), conversions.end(),
      [](const Conversion& conversion) { return conversion.action == Action::kQuantize; });
  const Conversion* first = found == conversions.end() ? nullptr : &*found;
  const Format format = first == nullptr ? Format::kNf4 : first->format;
  const std::string compute =
      compute_dtype ? name_of(*compute_dtype) : name_of_compute(config, first);
  Value value = Value::object();
  value.set("quant_method", Value::string("bitsandbytes"));
  value.set("_load_in_8bit", Value::boolean(false));
  value.set("_load_in_4bit", Value::boolean(true));
  value.set("llm_int8_threshold", Value::number(6.0));
  value.set("llm_int8_skip_modules", skipped_modules(conversions));
  value.set("llm_int8_enable_fp32_cpu_offload", Value::boolean(false));
  value.set("llm_int8_has_fp16_weight", Value::boolean(false));
  value.set("bnb_4bit_quant_type", Value::string(find_format(format)->name));
  value.set("bnb_4bit_use_double_quant", Value::boolean(first != nullptr && first->double_quant));
  value.set("bnb_4bit_compute_dtype", Value::string(compute));
  value.set("bnb_4bit_quant_storage", Value::string("uint8"));
  value.set("load_in_4bit", Value::boolean(true));
  value.set("load_in_8bit", Value::boolean(false));
  return value;
}

}  // namespace monograph
