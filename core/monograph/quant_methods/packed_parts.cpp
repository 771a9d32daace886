#include "monograph/quant_methods/packed_parts.h"

#include <algorithm>

#include "monograph/base/error.h"
#include "monograph/quant_methods/quant_method.h"
#include "monograph/quant_methods/skip_reason.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

using safetensors::ShardedWriter;
using safetensors::StoredDType;
using safetensors::TensorSpec;

std::string part_name(const Conversion& conversion, std::string_view suffix) {
  const std::string& name = conversion.weight->name;
  constexpr std::string_view kWeight = ".weight";
  const bool stack = conversion.stack != Stack::kNone && !name.ends_with(kWeight);
  if (stack) suffix.remove_prefix(kWeight.size());
  return std::string(module_of(name)) + std::string(suffix);
}

// The forms that users name, in the order of the formats.
std::vector<const WrittenForm*> named_forms() {
  std::vector<const WrittenForm*> forms;
  for (const QuantMethod* method : quant_methods()) {
    for (const WrittenForm& form : method->written) {
      if (form.stack == Stack::kNone) forms.push_back(&form);
    }
  }
  std::sort(forms.begin(), forms.end(),
            [](const WrittenForm* a, const WrittenForm* b) { return a->format < b->format; });
  return forms;
}

WrittenBy written_by(const Conversion& conversion) {
  return monograph::written_by(conversion.format, conversion.stack);
}

// Of [experts, rows, cols]; gpt-oss has the bytes of a block for a dimension of its own.
std::vector<TensorSpec> stack_specs(const Conversion& conversion, const WrittenForm& form,
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
      {values_name(conversion), form.values_type, std::move(values)},
      {part_name(conversion, form.scales),
       form.scales_type,
       {shape[0], square ? ceil_div(shape[1], block) : shape[1], ceil_div(cols, block)}}};
  if (!form.tensor.empty()) {
    specs.push_back({part_name(conversion, form.tensor), StoredDType::kF32, {shape[0]}});
  }
  return specs;
}

}  // namespace

std::optional<Format> written_format(std::string_view name) {
  for (const WrittenForm* form : named_forms()) {
    if (form->name == name) return form->format;
  }
  return std::nullopt;
}

std::vector<std::string> written_names() {
  std::vector<std::string> names;
  for (const WrittenForm* form : named_forms()) names.emplace_back(form->name);
  return names;
}

std::string_view written_name(Format format) { return written_by(format).form->name; }
std::string_view producer_of(Format format) { return written_by(format).method->name; }

void fit_groups(Conversion& conversion) {
  if (find_format(conversion.format)->shape != BlockShape::kGroup) return;
  const Weight& weight = *conversion.weight;
  const DType dtype = source_dtype(weight);
  conversion.format =
      with_scale_kind(conversion.format, dtype == DType::kBFloat16  ? ScaleKind::kBf16
                                         : dtype == DType::kFloat16 ? ScaleKind::kFp16
                                                                    : ScaleKind::kFp32);
  conversion.by_row = conversion.by_row || conversion.block == 0;
  if (!conversion.by_row) return;
  conversion.block = weight.shape.empty() ? 1 : std::max<std::uint64_t>(weight.shape.back(), 1);
}

std::string values_name(const Conversion& conversion) {
  const WrittenForm& form = *written_by(conversion).form;
  return form.values.empty() ? conversion.weight->name : part_name(conversion, form.values);
}

std::vector<TensorSpec> packed_specs(const Conversion& conversion) {
  const auto [method, row] = written_by(conversion);
  const WrittenForm& form = *row;
  const PackedLayout layout(conversion);
  if (form.specs != nullptr) return form.specs(conversion);
  const Weight& weight = *conversion.weight;
  if (conversion.stack != Stack::kNone) return stack_specs(conversion, form, layout);
  if (weight.shape.size() != 2 || !weight.name.ends_with(".weight")) {
    throw Error("weight " + text::in_quotes(weight.name) + " of " +
                std::to_string(weight.shape.size()) + " dimensions: " + std::string(method->name) +
                " stores " + std::string(form.name) + " for matrices with a name X.weight only");
  }
  const std::uint64_t rows = weight.shape[0], cols = weight.shape[1];
  const bool square = layout.info().shape == BlockShape::kSquare;
  const std::uint64_t block = conversion.block;
  std::vector<TensorSpec> specs = {
      {values_name(conversion), form.values_type, {rows, layout.value_bytes(cols)}},
      {part_name(conversion, form.scales),
       form.scales_type,
       {square ? ceil_div(rows, block) : rows, ceil_div(cols, block)}}};
  if (!form.tensor.empty())
    specs.push_back({part_name(conversion, form.tensor), StoredDType::kF32, {1}});
  return specs;
}

void write_packed_parts(const Conversion& conversion, const PackedScales& scales,
                        ShardedWriter& writer) {
  const WrittenForm& form = *written_by(conversion).form;
  if (form.write != nullptr) return form.write(conversion, scales, writer);
  const PackedLayout layout(conversion);
  write_array(writer, part_name(conversion, form.scales),
              reinterpret_cast<const std::uint8_t*>(scales.words.data()),
              layout.blocks() * layout.scale_bytes());
  if (form.tensor.empty()) return;
  const bool divides = layout.info().tensor_scale == TensorScale::kDivides;
  std::vector<float> tensors;
  for (const TensorScales& one : scales.tensors) {
    tensors.push_back(divides ? one.encode : one.decode);
  }
  write_array(writer, part_name(conversion, form.tensor), tensors.data(), tensors.size());
}

}  // namespace monograph
