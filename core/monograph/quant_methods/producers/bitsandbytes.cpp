// bitsandbytes: X.weight, X.weight.absmax, .quant_map, .quant_state ... for nf4 and fp4, of any
// shape; X.weight and X.SCB for int8, which is not decoded.
#include <array>
#include <bit>
#include <vector>

#include "monograph/base/error.h"
#include "monograph/formats/all.h"
#include "monograph/formats/bind.h"
#include "monograph/formats/dynamic_map.h"
#include "monograph/quant_methods/packed_parts.h"
#include "monograph/quant_methods/quant_method.h"
#include "monograph/quant_methods/quant_state.h"
#include "monograph/quant_methods/quantization_config.h"

namespace monograph {
namespace {

using json::Value;
using safetensors::LocatedTensor;
using safetensors::ShardedWriter;
using safetensors::StoredDType;
using safetensors::TensorSpec;

std::span<const float, 16> table_of(Format format) {
  return format == Format::kFp4 ? std::span<const float, 16>(Fp4::kValues)
                                : std::span<const float, 16>(Nf4::kValues);
}

// Files carry the table; a kernel has its own. Zeros of either sign are equal.
void check_table(const Candidate& found, Format format) {
  if (found.part("quant_map") == nullptr) return;
  found.want_dtype("quant_map", StoredDType::kF32);
  found.want_shape("quant_map", std::array<std::uint64_t, 1>{16});
  const std::uint8_t* bytes = found.part("quant_map")->bytes().data();
  const auto table = table_of(format);
  for (std::size_t i = 0; i < 16; ++i) {
    if (load_f32(bytes + 4 * i) != table[i]) {
      found.fail("quant_map is not the table of " + std::string(find_format(format)->name) +
                 ": entry " + std::to_string(i));
    }
  }
}

void check_size(const Candidate& found, std::string_view role, std::uint64_t wanted_bytes) {
  const std::uint64_t bytes = found.part(role)->entry->size_bytes;
  if (bytes != wanted_bytes) {
    found.fail(std::string(role) + " has " + std::to_string(bytes) + " bytes, wanted " +
               std::to_string(wanted_bytes));
  }
}

void check_scales(const Candidate& found, const QuantState& state) {
  const std::uint64_t blocks = ceil_div(state.elements, state.block);
  const std::array<std::uint64_t, 1> per_block = {blocks}, per_map = {256},
                                     per_group = {ceil_div(blocks, kScaleGroup)};
  found.want_dtype("absmax", state.nested ? StoredDType::kU8 : StoredDType::kF32);
  found.want_shape("absmax", per_block);
  for (const std::string_view role : {"nested_absmax", "nested_quant_map"}) {
    if ((found.part(role) != nullptr) != state.nested) {
      found.fail(std::string(role) + (state.nested ? " is missing" : " is there") +
                 ", quant_state says the scales are " + (state.nested ? "" : "not ") + "nested");
    }
  }
  if (!state.nested) return;
  found.want_dtype("nested_absmax", StoredDType::kF32);
  found.want_shape("nested_absmax", per_group);
  found.want_dtype("nested_quant_map", StoredDType::kF32);
  found.want_shape("nested_quant_map", per_map);
}

// The offset of nested scales stands in the JSON, not in a tensor.
void bind(const Candidate& found, Format format, const QuantState& state) {
  const auto bytes_of = [&](std::string_view role) {
    const auto bytes = found.part(role)->bytes();
    return ByteSpan{bytes.data(), bytes.size()};
  };
  const auto offset = std::bit_cast<std::array<std::uint8_t, 4>>(state.offset);
  std::vector<ByteSpan> scales = {bytes_of("absmax")};
  if (state.nested)
    scales.insert(scales.end(), {bytes_of("nested_absmax"), bytes_of("nested_quant_map"),
                                 ByteSpan{offset.data(), offset.size()}});
  const std::vector<std::size_t> shape(state.shape.begin(), state.shape.end());
  try {
    found.weight().view =
        bind_packed(*find_format(format), state.block, shape, bytes_of("values"), scales);
  } catch (const Error& error) {
    found.fail(error.what());
  }
}

void describe_four_bits(const Candidate& found, Format format) {
  Weight& weight = found.weight();
  const LocatedTensor& written = *found.part("quant_state");
  found.want_dtype("quant_state", StoredDType::kU8);
  const auto text = written.bytes();
  const std::string source = written.file->path().string() + ": weight '" + weight.name + "'";
  const QuantState state =
      parse_quant_state({reinterpret_cast<const char*>(text.data()), text.size()}, format, source);
  // Any storage type: bitsandbytes stores the bytes as bf16 or fp32 elements for FSDP.
  check_size(found, "values", packed_bytes(*find_format(format), state.elements));
  check_scales(found, state);
  check_table(found, format);

  weight.format = find_format(format)->name;
  weight.shape = state.shape;
  weight.elements = state.elements;
  weight.block = {state.block};
  weight.double_quant = state.nested;
  weight.dtype = stored(state.dtype);
  bind(found, format, state);
}

void describe_int8(const Candidate& found) {
  const std::vector<std::uint64_t>& shape = found.shape_of("values");
  if (shape.size() != 2) found.fail("values must have two dimensions");
  found.want_shape("scale", std::array{shape[0]});
  found.set_shape(shape, {1, shape[1]});
}

constexpr std::array kStored = {
    StoredForm{"nf4",
               "",
               "",
               {{{".quant_state.bitsandbytes__nf4", "quant_state", true},
                 {".absmax", "absmax", true},
                 {".quant_map", "quant_map"},
                 {".nested_absmax", "nested_absmax"},
                 {".nested_quant_map", "nested_quant_map"}}},
               [](const Candidate&) { return true; },
               [](const Candidate& found) { describe_four_bits(found, Format::kNf4); }},
    StoredForm{"fp4",
               "",
               "",
               {{{".quant_state.bitsandbytes__fp4", "quant_state", true},
                 {".absmax", "absmax", true},
                 {".quant_map", "quant_map"},
                 {".nested_absmax", "nested_absmax"},
                 {".nested_quant_map", "nested_quant_map"}}},
               [](const Candidate&) { return true; },
               [](const Candidate& found) { describe_four_bits(found, Format::kFp4); }},
    StoredForm{"int8",
               ".weight",
               ".weight",
               {{{".SCB", "scale", true}, {".weight_format", "weight_format"}}},
               [](const Candidate& found) { return found.values_are(StoredDType::kI8); },
               describe_int8},
};

// Suffixes that mean nothing on their own: such a tensor belongs to a weight that is not there.
constexpr std::array<std::string_view, 5> kOrphans = {
    ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".quant_state.bitsandbytes__"};

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

std::vector<TensorSpec> specs_of(const Conversion& conversion) {
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

void write_parts(const Conversion& conversion, const PackedScales& packed, ShardedWriter& writer) {
  const std::vector<float>& scales = packed.words;
  const std::string& name = conversion.weight->name;
  QuantState state = state_of(conversion);
  if (conversion.double_quant) {
    std::vector<std::uint8_t> codes(scales.size());
    std::vector<float> groups(ceil_div(scales.size(), kScaleGroup));
    double_quantize(scales.data(), scales.size(), codes.data(), groups.data(), &state.offset,
                    serial_for);
    write_array(writer, name + ".absmax", codes.data(), codes.size());
    write_array(writer, name + ".nested_absmax", groups.data(), groups.size());
    write_array(writer, name + ".nested_quant_map", kDynamicMap, 256);
  } else {
    write_array(writer, name + ".absmax", scales.data(), scales.size());
  }
  write_array(writer, name + ".quant_map",
              conversion.format == Format::kFp4 ? Fp4::kValues : Nf4::kValues, 16);
  const std::string text = quant_state_text(state);
  write_array(writer, state_name(conversion), text.data(), text.size());
}

constexpr std::array kWritten = {
    WrittenForm{.name = "nf4", .format = Format::kNf4, .specs = specs_of, .write = write_parts},
    WrittenForm{.name = "fp4", .format = Format::kFp4, .specs = specs_of, .write = write_parts}};

std::string name_of_compute(const Value& config, const Conversion* first) {
  for (const std::string_view key : {"dtype", "torch_dtype"}) {
    const Value* value = config.find(key);
    if (value != nullptr && value->as_string()) return std::string(*value->as_string());
  }
  const auto dtype = first == nullptr ? std::nullopt : float_type(first->weight->dtype);
  return name_of(dtype.value_or(DType::kBFloat16));
}

Value config_of(const ConfigRequest& request) {
  const Conversion* first = request.first;
  const Format format = first == nullptr ? Format::kNf4 : first->format;
  const std::string compute = request.compute_dtype ? name_of(*request.compute_dtype)
                                                    : name_of_compute(request.config, first);
  Value value = Value::object();
  value.set("quant_method", Value::string("bitsandbytes"));
  value.set("_load_in_8bit", Value::boolean(false));
  value.set("_load_in_4bit", Value::boolean(true));
  value.set("llm_int8_threshold", Value::number(6.0));
  value.set("llm_int8_skip_modules", skipped_modules(request.conversions));
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

}  // namespace

namespace producers {

const QuantMethod& bitsandbytes() {
  static constexpr QuantMethod kMethod = {.name = "bitsandbytes",
                                          .stored = kStored,
                                          .written = kWritten,
                                          .config = config_of,
                                          .mixes_formats = true,
                                          .orphans = kOrphans,
                                          .orphan_lacks = "values, absmax or quant_state"};
  return kMethod;
}

}  // namespace producers
}  // namespace monograph
