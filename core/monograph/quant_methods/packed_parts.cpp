#include "monograph/quant_methods/packed_parts.h"

#include <algorithm>
#include <array>

#include "monograph/base/error.h"
#include "monograph/formats/all.h"
#include "monograph/formats/dynamic_map.h"
#include "monograph/quant_methods/quant_state.h"
#include "monograph/quant_methods/skip_reason.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

using safetensors::ShardedWriter;
using safetensors::StoredDType;
using safetensors::TensorSpec;

// Suffixes take the place of ".weight".
struct Written {
  std::string_view name;  // as users say it
  Format format;
  std::string_view producer;
  std::string_view values, scales, tensor;
  StoredDType values_type = StoredDType::kU8, scales_type = StoredDType::kU8;
};

constexpr std::array kWritten = {
    Written{"nf4", Format::kNf4, "bitsandbytes", "", "", ""},
    Written{"fp4", Format::kFp4, "bitsandbytes", "", "", ""},
    Written{"mxfp4", Format::kMxfp4, "compressed-tensors", ".weight_packed", ".weight_scale", ""},
    Written{"mxfp8", Format::kMxfp8, "compressed-tensors", ".weight", ".weight_scale", "",
            StoredDType::kF8E4M3},
    Written{"nvfp4", Format::kNvfp4Divide, "compressed-tensors", ".weight_packed", ".weight_scale",
            ".weight_global_scale", StoredDType::kU8, StoredDType::kF8E4M3},
    Written{"fp8-block", Format::kFp8Block, "DeepSeek", ".weight", ".weight_scale_inv", "",
            StoredDType::kF8E4M3, StoredDType::kF32},
};

constexpr Written kGptOss = {"mxfp4",          Format::kMxfp4,   "gpt-oss",
                             ".weight_blocks", ".weight_scales", ""};

const Written& written(Format format) {
  const auto* found = std::find_if(kWritten.begin(), kWritten.end(),
                                   [&](const Written& row) { return row.format == format; });
  if (found == kWritten.end()) throw Error("this format is not one that is written");
  return *found;
}

QuantState state_of(const Conversion& conversion) {
  QuantState state;
  state.format = conversion.format;
  state.block = conversion.block;
  state.dtype = source_dtype(*conversion.weight);
  state.shape = conversion.weight->shape;
  state.elements = conversion.weight->elements;
  state.nested = conversion.double_quant;
  return state;
}

std::string state_name(const Conversion& conversion) {
  return conversion.weight->name + ".quant_state.bitsandbytes__" +
         find_format(conversion.format)->name;
}

std::string part_name(const Conversion& conversion, std::string_view suffix) {
  const std::string& name = conversion.weight->name;
  constexpr std::string_view kWeight = ".weight";
  const bool stack = conversion.stack != Stack::kNone && !name.ends_with(kWeight);
  if (stack) suffix.remove_prefix(kWeight.size());
  return std::string(module_of(name)) + std::string(suffix);
}

const Written& row_of(const Conversion& conversion) {
  return conversion.stack == Stack::kGptOss ? kGptOss : written(conversion.format);
}

template <class T>
void write_all(ShardedWriter& writer, const std::string& name, const T* data, std::size_t count) {
  writer.write(name, 0, {reinterpret_cast<const std::uint8_t*>(data), count * sizeof(T)});
}

// Of [experts, rows, cols]; gpt-oss has the bytes of a block for a dimension of its own.
std::vector<TensorSpec> stack_specs(const Conversion& conversion, const Written& row,
                                    const PackedLayout& layout) {
  const std::vector<std::uint64_t>& shape = conversion.weight->shape;
  if (shape.size() != 3) throw Error("a stack of experts has three dimensions");
  const std::uint64_t block = conversion.block, cols = shape[2];
  const bool square = layout.info().shape == BlockShape::kSquare;
  std::vector<std::uint64_t> values = {shape[0], shape[1], layout.value_bytes(cols)};
  if (conversion.stack == Stack::kGptOss) {
    values = {shape[0], shape[1], cols / block, layout.value_bytes(block)};
  }
  std::vector<TensorSpec> specs = {
      {values_name(conversion), row.values_type, std::move(values)},
      {part_name(conversion, row.scales),
       row.scales_type,
       {shape[0], square ? ceil_div(shape[1], block) : shape[1], ceil_div(cols, block)}}};
  if (!row.tensor.empty()) {
    specs.push_back({part_name(conversion, row.tensor), StoredDType::kF32, {shape[0]}});
  }
  return specs;
}

std::vector<TensorSpec> bitsandbytes_specs(const Conversion& conversion) {
  const Weight& weight = *conversion.weight;
  const std::uint64_t blocks = ceil_div(weight.elements, conversion.block);
  const std::uint64_t bytes = packed_bytes(*find_format(conversion.format), weight.elements);
  const std::string& name = weight.name;
  std::vector<TensorSpec> specs = {
      {name, StoredDType::kU8, {bytes, 1}},
      {name + ".absmax", conversion.double_quant ? StoredDType::kU8 : StoredDType::kF32, {blocks}},
      {name + ".quant_map", StoredDType::kF32, {16}},
      {state_name(conversion), StoredDType::kU8, {quant_state_text(state_of(conversion)).size()}}};
  if (conversion.double_quant) {
    specs.push_back({name + ".nested_absmax", StoredDType::kF32, {ceil_div(blocks, kScaleGroup)}});
    specs.push_back({name + ".nested_quant_map", StoredDType::kF32, {256}});
  }
  return specs;
}

void write_bitsandbytes(const Conversion& conversion, const std::vector<float>& scales,
                        ShardedWriter& writer) {
  const std::string& name = conversion.weight->name;
  QuantState state = state_of(conversion);
  if (conversion.double_quant) {
    std::vector<std::uint8_t> codes(scales.size());
    std::vector<float> groups(ceil_div(scales.size(), kScaleGroup));
    double_quantize(scales.data(), scales.size(), codes.data(), groups.data(), &state.offset,
                    serial_for);
    write_all(writer, name + ".absmax", codes.data(), codes.size());
    write_all(writer, name + ".nested_absmax", groups.data(), groups.size());
    write_all(writer, name + ".nested_quant_map", kDynamicMap, 256);
  } else {
    write_all(writer, name + ".absmax", scales.data(), scales.size());
  }
  write_all(writer, name + ".quant_map",
            conversion.format == Format::kFp4 ? Fp4::kValues : Nf4::kValues, 16);
  const std::string text = quant_state_text(state);
  write_all(writer, state_name(conversion), text.data(), text.size());
}

}  // namespace

std::optional<Format> written_format(std::string_view name) {
  for (const Written& row : kWritten) {
    if (row.name == name) return row.format;
  }
  return std::nullopt;
}

std::vector<std::string> written_names() {
  std::vector<std::string> names;
  names.reserve(kWritten.size());
  for (const Written& row : kWritten) names.emplace_back(row.name);
  return names;
}

std::string_view written_name(Format format) { return written(format).name; }
std::string_view producer_of(Format format) { return written(format).producer; }

std::string values_name(const Conversion& conversion) {
  const Written& row = row_of(conversion);
  return row.values.empty() ? conversion.weight->name : part_name(conversion, row.values);
}

std::vector<TensorSpec> packed_specs(const Conversion& conversion) {
  const Written& row = row_of(conversion);
  const PackedLayout layout(conversion);
  if (row.values.empty()) return bitsandbytes_specs(conversion);
  const Weight& weight = *conversion.weight;
  if (conversion.stack != Stack::kNone) return stack_specs(conversion, row, layout);
  if (weight.shape.size() != 2 || !weight.name.ends_with(".weight")) {
    throw Error("weight " + text::in_quotes(weight.name) + " of " +
                std::to_string(weight.shape.size()) + " dimensions: " + std::string(row.producer) +
                " stores " + std::string(row.name) + " for matrices with a name X.weight only");
  }
  const std::uint64_t rows = weight.shape[0], cols = weight.shape[1];
  const bool square = layout.info().shape == BlockShape::kSquare;
  const std::uint64_t block = conversion.block;
  std::vector<TensorSpec> specs = {
      {values_name(conversion), row.values_type, {rows, layout.value_bytes(cols)}},
      {part_name(conversion, row.scales),
       row.scales_type,
       {square ? ceil_div(rows, block) : rows, ceil_div(cols, block)}}};
  if (!row.tensor.empty())
    specs.push_back({part_name(conversion, row.tensor), StoredDType::kF32, {1}});
  return specs;
}

void write_packed_parts(const Conversion& conversion, const PackedScales& scales,
                        ShardedWriter& writer) {
  const Written& row = row_of(conversion);
  if (row.values.empty()) return write_bitsandbytes(conversion, scales.words, writer);
  const PackedLayout layout(conversion);
  write_all(writer, part_name(conversion, row.scales),
            reinterpret_cast<const std::uint8_t*>(scales.words.data()),
            layout.blocks() * layout.scale_bytes());
  if (row.tensor.empty()) return;
  const bool divides = layout.info().tensor_scale == TensorScale::kDivides;
  std::vector<float> tensors;
  for (const TensorScales& one : scales.tensors) {
    tensors.push_back(divides ? one.encode : one.decode);
  }
  write_all(writer, part_name(conversion, row.tensor), tensors.data(), tensors.size());
}

}  // namespace monograph
