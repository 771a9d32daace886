#include "convert/packed_parts.h"

#include "formats/all.h"
#include "formats/dynamic_map.h"
#include "weights/quant_state.h"

namespace monograph {
namespace {

using safetensors::ShardedWriter;
using safetensors::StoredDType;

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

template <class T>
void write_all(ShardedWriter& writer, const std::string& name, const T* data, std::size_t count) {
  writer.write(name, 0, {reinterpret_cast<const std::uint8_t*>(data), count * sizeof(T)});
}

}  // namespace

DType source_dtype(const Weight& weight) {
  return float_type(weight.dtype).value_or(DType::kFloat32);
}

std::vector<safetensors::TensorSpec> packed_specs(const Conversion& conversion) {
  const Weight& weight = *conversion.weight;
  const std::uint64_t blocks = ceil_div(weight.elements, conversion.block);
  const std::uint64_t bytes = packed_bytes(*find_format(conversion.format), weight.elements);
  const std::string& name = weight.name;
  std::vector<safetensors::TensorSpec> specs = {
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

void write_packed_parts(const Conversion& conversion, std::span<const float> scales,
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

}  // namespace monograph
