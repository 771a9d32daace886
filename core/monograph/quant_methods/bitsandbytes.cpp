// The 4-bit weights of bitsandbytes: values, absmax, the tables and the quant_state.
#include <array>
#include <bit>
#include <vector>

#include "monograph/base/error.h"
#include "monograph/formats/all.h"
#include "monograph/formats/bind.h"
#include "monograph/quant_methods/quant_state.h"
#include "monograph/quant_methods/spellings.h"

namespace monograph {
namespace {

using safetensors::LocatedTensor;
using safetensors::StoredDType;

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

}  // namespace

void describe_bitsandbytes(const Candidate& found, Format format) {
  Weight& weight = found.weight();
  const LocatedTensor& json = *found.part("quant_state");
  found.want_dtype("quant_state", StoredDType::kU8);
  const auto text = json.bytes();
  const std::string source = json.file->path().string() + ": weight '" + weight.name + "'";
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

}  // namespace monograph
