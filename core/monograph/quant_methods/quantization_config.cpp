#include "monograph/quant_methods/quantization_config.h"

#include <algorithm>
#include <string>

#include "monograph/base/error.h"
#include "monograph/quant_methods/packed_parts.h"
#include "monograph/quant_methods/quant_method.h"
#include "monograph/quant_methods/skip_reason.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

using json::Value;

// One config describes one producer and, but for nf4 and fp4, one format.
void check_one_format(const Conversion& first, const Conversion& other) {
  const QuantMethod* method = written_by(first.format).method;
  // One of several types of scales counts as the same.
  const bool fits = method->mixes_formats
                        ? written_by(other.format).method == method
                        : written_by(other.format).form == written_by(first.format).form;
  const bool gpt_oss = first.stack == Stack::kGptOss;
  if (fits && gpt_oss == (other.stack == Stack::kGptOss)) return;
  if (fits) {
    throw Error("weight " + text::in_quotes((gpt_oss ? other : first).weight->name) +
                " would be mxfp4 beside the experts of gpt-oss, whose loaders want experts alone "
                "to be quantised");
  }
  throw Error("weight " + text::in_quotes(other.weight->name) + " would be " +
              std::string(written_name(other.format)) + " beside " +
              std::string(written_name(first.format)) + " of " +
              text::in_quotes(first.weight->name) + "; no loader knows such a mixture");
}

}  // namespace

Value compressed_config(std::string_view format, Value weights, Value ignore) {
  Value targets = Value::array();
  targets.append(Value::string("Linear"));
  Value group = Value::object();
  group.set("targets", std::move(targets));
  group.set("weights", std::move(weights));
  group.set("input_activations", Value());
  group.set("output_activations", Value());
  group.set("format", Value::string(format));
  Value groups = Value::object();
  groups.set("group_0", std::move(group));
  Value value = Value::object();
  value.set("config_groups", std::move(groups));
  value.set("quant_method", Value::string("compressed-tensors"));
  value.set("kv_cache_scheme", Value());
  value.set("format", Value::string(format));
  value.set("quantization_status", Value::string("compressed"));
  value.set("global_compression_ratio", Value());
  value.set("ignore", std::move(ignore));
  return value;
}

Value skipped_modules(std::span<const Conversion> conversions) {
  Value list = Value::array();
  // Also where the head is tied and has no tensor; readers take it for dense.
  const bool packed_head =
      std::any_of(conversions.begin(), conversions.end(), [](const Conversion& conversion) {
        return conversion.weight->name == "lm_head.weight" &&
               (conversion.action == Action::kQuantize || conversion.weight->is_packed());
      });
  if (!packed_head) list.append(Value::string("lm_head"));
  for (const Conversion& conversion : conversions) {
    const Weight& weight = *conversion.weight;
    const std::string_view why = skip_reason(weight);
    if (conversion.action == Action::kQuantize || weight.is_packed()) continue;
    if (why == "not a matrix" || why == "not a float" || why == "embedding") continue;
    if (weight.name != "lm_head.weight") list.append(Value::string(module_of(weight.name)));
  }
  return list;
}

Value quantization_config(const Value& config, std::span<const Conversion> conversions,
                          std::optional<DType> compute_dtype) {
  const Conversion* first = nullptr;
  bool stacked = false;
  for (const Conversion& conversion : conversions) {
    if (conversion.action != Action::kQuantize) continue;
    if (first == nullptr) first = &conversion;
    check_one_format(*first, conversion);
    stacked |= conversion.stack == Stack::kOwn;
  }
  const WrittenBy by =
      first == nullptr ? written_by(Format::kNf4) : written_by(first->format, first->stack);
  Value value = by.method->config({config, conversions, first, compute_dtype});
  if (stacked) value.set("monograph_experts", Value::string("stacked"));
  return value;
}

}  // namespace monograph
