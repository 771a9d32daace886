#include "monograph/quant_methods/quantization_config.h"

#include <algorithm>
#include <string>

#include "monograph/base/error.h"
#include "monograph/quant_methods/packed_parts.h"
#include "monograph/quant_methods/skip_reason.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

using json::Value;

// Modules that transformers must not make packed layers of: every matrix that stayed as it was.
// Given a list, transformers does not look for the head itself.
Value skipped_modules(std::span<const Conversion> conversions) {
  Value list = Value::array();
  list.append(Value::string("lm_head"));
  for (const Conversion& conversion : conversions) {
    const Weight& weight = *conversion.weight;
    const std::string_view why = skip_reason(weight);
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

Value bitsandbytes_config(const Value& config, std::span<const Conversion> conversions,
                          const Conversion* first, std::optional<DType> compute_dtype) {
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

// The scheme of compressed-tensors for weights, and its name for how they are stored.
struct Scheme {
  const char* format;
  const char* weights;
};

Scheme scheme_of(Format format) {
  switch (format) {
    case Format::kMxfp4:
      return {"mxfp4-pack-quantized",
              R"({"num_bits": 4, "type": "float", "symmetric": true, "group_size": 32,
                  "strategy": "group", "dynamic": false, "scale_dtype": "torch.uint8"})"};
    case Format::kMxfp8:
      return {"mxfp8-quantized",
              R"({"num_bits": 8, "type": "float", "symmetric": true, "group_size": 32,
                  "strategy": "group", "dynamic": false, "scale_dtype": "torch.uint8"})"};
    default:
      return {"nvfp4-pack-quantized",
              R"({"num_bits": 4, "type": "float", "symmetric": true, "group_size": 16,
                  "strategy": "tensor_group", "dynamic": false,
                  "scale_dtype": "torch.float8_e4m3fn"})"};
  }
}

Value compressed_tensors_config(std::span<const Conversion> conversions, Format format) {
  const Scheme scheme = scheme_of(format);
  Value group = Value::object();
  Value targets = Value::array();
  targets.append(Value::string("Linear"));
  group.set("targets", std::move(targets));
  group.set("weights", json::parse(scheme.weights, "scheme"));
  group.set("input_activations", Value());
  group.set("output_activations", Value());
  group.set("format", Value::string(scheme.format));
  Value groups = Value::object();
  groups.set("group_0", std::move(group));
  Value value = Value::object();
  value.set("config_groups", std::move(groups));
  value.set("quant_method", Value::string("compressed-tensors"));
  value.set("kv_cache_scheme", Value());
  value.set("format", Value::string(scheme.format));
  value.set("quantization_status", Value::string("compressed"));
  value.set("global_compression_ratio", Value());
  value.set("ignore", skipped_modules(conversions));
  return value;
}

Value fp8_config(std::span<const Conversion> conversions, std::size_t block) {
  Value value = Value::object();
  value.set("quant_method", Value::string("fp8"));
  value.set("fmt", Value::string("e4m3"));
  value.set("activation_scheme", Value::string("dynamic"));
  Value sizes = Value::array();
  for (int i = 0; i < 2; ++i) sizes.append(Value::number(static_cast<std::int64_t>(block)));
  value.set("weight_block_size", std::move(sizes));
  value.set("modules_to_not_convert", skipped_modules(conversions));
  return value;
}

Value gpt_oss_config() {
  return json::parse(R"({"quant_method": "mxfp4", "modules_to_not_convert":
                         ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                          "model.embed_tokens", "lm_head"]})",
                     "gpt-oss");
}

// One config describes one producer and, but for nf4 and fp4, one format.
void check_one_format(const Conversion& first, const Conversion& other) {
  const std::string_view producer = producer_of(first.format);
  const bool fits = producer == "bitsandbytes" ? producer_of(other.format) == producer
                                               : other.format == first.format;
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

Value config_of_producer(const Value& config, std::span<const Conversion> conversions,
                         const Conversion* first, std::optional<DType> compute_dtype) {
  const std::string_view producer = first == nullptr ? "bitsandbytes" : producer_of(first->format);
  if (first != nullptr && first->stack == Stack::kGptOss) return gpt_oss_config();
  if (producer == "compressed-tensors")
    return compressed_tensors_config(conversions, first->format);
  if (producer == "DeepSeek") return fp8_config(conversions, first->block);
  return bitsandbytes_config(config, conversions, first, compute_dtype);
}

}  // namespace

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
  Value value = config_of_producer(config, conversions, first, compute_dtype);
  if (stacked) value.set("monograph_experts", Value::string("stacked"));
  return value;
}

}  // namespace monograph
