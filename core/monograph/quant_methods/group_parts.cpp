#include "monograph/quant_methods/group_parts.h"

#include "monograph/base/error.h"
#include "monograph/formats/zero_points.h"
#include "monograph/quant_methods/skip_reason.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

using json::Value;
using safetensors::StoredDType;
using safetensors::TensorSpec;

bool is_integer(const FormatInfo& info) { return info.zero_points != ZeroPoints::kNone; }

StoredDType scale_type(const FormatInfo& info) {
  switch (info.kinds[0]) {
    case ScaleKind::kBf16:
      return StoredDType::kBF16;
    case ScaleKind::kFp16:
      return StoredDType::kF16;
    default:
      return StoredDType::kF32;
  }
}

std::string part(const Conversion& conversion, std::string_view suffix) {
  return std::string(module_of(conversion.weight->name)) + std::string(suffix);
}

}  // namespace

std::vector<TensorSpec> group_specs(const Conversion& conversion) {
  const Weight& weight = *conversion.weight;
  const PackedLayout layout(conversion);
  const FormatInfo& info = layout.info();
  if (weight.shape.size() != 2 || !weight.name.ends_with(".weight")) {
    throw Error("weight " + text::in_quotes(weight.name) + " of " +
                std::to_string(weight.shape.size()) + " dimensions: compressed-tensors stores " +
                std::string(written_name(conversion.format)) +
                " for matrices with a name X.weight only");
  }
  const std::uint64_t rows = weight.shape[0], cols = weight.shape[1];
  const std::uint64_t groups = cols / conversion.block;
  const TensorSpec scales = {part(conversion, ".weight_scale"), scale_type(info), {rows, groups}};
  if (!is_integer(info)) return {{weight.name, StoredDType::kF8E4M3, {rows, cols}}, scales};
  std::vector<TensorSpec> specs = {
      {part(conversion, ".weight_packed"), StoredDType::kI32, {rows, row_bytes(info, cols) / 4}},
      scales,
      {part(conversion, ".weight_shape"), StoredDType::kI64, {2}}};
  if (layout.has_zero_points()) {
    const std::uint64_t words = ceil_div(rows * static_cast<std::uint64_t>(info.bits), 32);
    specs.push_back({part(conversion, ".weight_zero_point"), StoredDType::kI32, {words, groups}});
  }
  return specs;
}

void write_group_parts(const Conversion& conversion, const PackedScales& scales,
                       safetensors::ShardedWriter& writer) {
  const PackedLayout layout(conversion);
  const FormatInfo& info = layout.info();
  write_array(writer, part(conversion, ".weight_scale"),
              reinterpret_cast<const std::uint8_t*>(scales.words.data()),
              layout.blocks() * layout.scale_bytes());
  if (!is_integer(info)) return;
  const std::vector<std::uint64_t>& shape = conversion.weight->shape;
  const std::int64_t numbers[2] = {static_cast<std::int64_t>(shape[0]),
                                   static_cast<std::int64_t>(shape[1])};
  write_array(writer, part(conversion, ".weight_shape"), numbers, 2);
  if (!layout.has_zero_points()) return;
  const std::size_t groups = shape[1] / conversion.block;
  std::vector<std::uint8_t> stored(zero_point_bytes(info, shape[0], groups));
  store_zero_points(info, shape[0], groups, scales.zeros.data(), stored.data());
  write_array(writer, part(conversion, ".weight_zero_point"), stored.data(), stored.size());
}

Value integer_scheme(std::uint64_t bits, std::uint64_t group, bool symmetric) {
  Value weights = Value::object();
  weights.set("num_bits", Value::number(static_cast<std::int64_t>(bits)));
  weights.set("type", Value::string("int"));
  weights.set("symmetric", Value::boolean(symmetric));
  weights.set("group_size", group == 0 ? Value() : Value::number(static_cast<std::int64_t>(group)));
  weights.set("strategy", Value::string(group == 0 ? "channel" : "group"));
  weights.set("dynamic", Value::boolean(false));
  weights.set("actorder", Value());
  return weights;
}

std::string_view group_storage(const Conversion& conversion) {
  return is_integer(*find_format(conversion.format)) ? "pack-quantized" : "float-quantized";
}

Value group_scheme(const Conversion& conversion) {
  const FormatInfo& info = *find_format(conversion.format);
  Value weights = integer_scheme(static_cast<std::uint64_t>(info.bits),
                                 conversion.by_row ? 0 : conversion.block,
                                 conversion.rule != ScaleRule::kMinMax);
  if (!is_integer(info)) weights.set("type", Value::string("float"));
  return weights;
}

}  // namespace monograph
