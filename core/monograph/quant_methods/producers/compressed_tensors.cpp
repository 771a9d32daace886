// compressed-tensors, the format of llm-compressor and vLLM: X.weight_packed or X.weight,
// X.weight_scale, X.weight_global_scale, X.weight_zero_point, X.weight_shape.
#include <array>

#include "monograph/quant_methods/group_layouts.h"
#include "monograph/quant_methods/group_parts.h"
#include "monograph/quant_methods/quant_method.h"
#include "monograph/quant_methods/quantization_config.h"
#include "monograph/quant_methods/shared_layouts.h"

namespace monograph {
namespace {

using json::Value;
using safetensors::StoredDType;

constexpr std::array kStored = {
    StoredForm{"nvfp4",
               ".weight_packed",
               ".weight",
               {{{".weight_scale", "scale", true},
                 {".weight_global_scale", "global_scale", true},
                 {".input_global_scale", "input_scale"}}},
               [](const Candidate& found) {
                 return found.values_are(StoredDType::kU8) &&
                        found.dtype_of("scale") == StoredDType::kF8E4M3;
               },
               [](const Candidate& found) { describe_nvfp4(found, Format::kNvfp4Divide); }},
    StoredForm{"mxfp4",
               ".weight_packed",
               ".weight",
               {{{".weight_scale", "scale", true}}},
               [](const Candidate& found) {
                 return found.values_are(StoredDType::kU8) && found.scale_is_e8m0();
               },
               describe_mxfp4},
    StoredForm{"fp8",
               ".weight",
               ".weight",
               {{{".weight_scale", "scale", true}, {".input_scale", "input_scale"}}},
               [](const Candidate& found) { return found.values_are(StoredDType::kF8E4M3); },
               [](const Candidate& found) {
                 describe_fp8(found);
                 // The library dequantises to the type of the scales, which is the model's.
                 if (found.weight().format == "fp8") found.weight().dtype = found.dtype_of("scale");
               }},
    StoredForm{"int4",
               ".weight_packed",
               ".weight",
               {{{".weight_scale", "scale", true},
                 {".weight_shape", "shape", true},
                 {".weight_zero_point", "zero_point"},
                 {".weight_g_idx", "g_idx"},
                 {".weight_columns", "columns"}}},
               [](const Candidate& found) { return found.values_are(StoredDType::kI32); },
               describe_packed_integers},
    StoredForm{"int8",
               ".weight",
               ".weight",
               {{{".weight_scale", "scale", true},
                 {".weight_zero_point", "zero_point"},
                 {".input_scale", "input_scale"},
                 {".input_zero_point", "input_zero_point"}}},
               [](const Candidate& found) { return found.values_are(StoredDType::kI8); },
               describe_int8},
};

constexpr std::array kWritten = {WrittenForm{.name = "mxfp4",
                                             .format = Format::kMxfp4,
                                             .values = ".weight_packed",
                                             .scales = ".weight_scale"},
                                 WrittenForm{.name = "mxfp8",
                                             .format = Format::kMxfp8,
                                             .values = ".weight",
                                             .scales = ".weight_scale",
                                             .values_type = StoredDType::kF8E4M3},
                                 WrittenForm{.name = "nvfp4",
                                             .format = Format::kNvfp4Divide,
                                             .values = ".weight_packed",
                                             .scales = ".weight_scale",
                                             .tensor = ".weight_global_scale",
                                             .scales_type = StoredDType::kF8E4M3},
                                 WrittenForm{.name = "int4",
                                             .format = Format::kInt4Bf16,
                                             .values = ".weight_packed",
                                             .specs = group_specs,
                                             .write = write_group_parts},
                                 WrittenForm{.name = "int8",
                                             .format = Format::kInt8PackedBf16,
                                             .values = ".weight_packed",
                                             .specs = group_specs,
                                             .write = write_group_parts},
                                 WrittenForm{.name = "fp8",
                                             .format = Format::kFp8RowBf16,
                                             .values = ".weight",
                                             .specs = group_specs,
                                             .write = write_group_parts}};

constexpr std::array<std::string_view, 7> kOrphans = {
    ".weight_packed",     ".weight_scale", ".weight_shape",  ".weight_global_scale",
    ".weight_zero_point", ".weight_g_idx", ".weight_columns"};

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

Value config_of(const ConfigRequest& request) {
  const Conversion& first = *request.first;
  if (find_format(first.format)->shape == BlockShape::kGroup) {
    return compressed_config(group_storage(first), group_scheme(first),
                             skipped_modules(request.conversions));
  }
  const Scheme scheme = scheme_of(first.format);
  return compressed_config(scheme.format, json::parse(scheme.weights, "scheme"),
                           skipped_modules(request.conversions));
}

}  // namespace

namespace producers {

const QuantMethod& compressed_tensors() {
  static constexpr QuantMethod kMethod = {
      .name = "compressed-tensors",
      .stored = kStored,
      .written = kWritten,
      .config = config_of,
      .orphans = kOrphans,
      .orphan_lacks = "weight_packed, weight_scale or weight_shape, or has them in another type",
      .orphans_by_config = true};
  return kMethod;
}

}  // namespace producers
}  // namespace monograph
