#include "monograph/quant_methods/group_layouts.h"

#include <cstring>
#include <optional>

#include "monograph/formats/format.h"

namespace monograph {
namespace {

using safetensors::StoredDType;
using Shape = std::vector<std::uint64_t>;

// The format with scales of the stored type; `first` is the one with bf16 scales. The type is that
// of the tensor: fp16 and bf16 have one size.
Format with_scales(const Candidate& found, Format first) {
  std::uint8_t kind = 0;
  switch (found.dtype_of("scale")) {
    case StoredDType::kBF16:
      break;
    case StoredDType::kF16:
      kind = 1;
      break;
    case StoredDType::kF32:
      kind = 2;
      break;
    default:
      found.fail("scale is " + std::string(name_of(found.dtype_of("scale"))) +
                 ", wanted BF16, F16 or F32");
  }
  return static_cast<Format>(static_cast<std::uint8_t>(first) + kind);
}

// The two numbers of "shape".
Shape stated_shape(const Candidate& found) {
  found.want_dtype("shape", StoredDType::kI64);
  const Shape two = {2};
  found.want_shape("shape", two);
  std::int64_t numbers[2];
  std::memcpy(numbers, found.part("shape")->bytes().data(), sizeof numbers);
  if (numbers[0] < 0 || numbers[1] < 0) {
    found.fail("shape is [" + std::to_string(numbers[0]) + ", " + std::to_string(numbers[1]) +
               "], wanted no negative number");
  }
  return {static_cast<std::uint64_t>(numbers[0]), static_cast<std::uint64_t>(numbers[1])};
}

// How many elements of a row share a scale; sets shape and block. One scale for all counts as rows.
std::uint64_t set_groups(const Candidate& found, const Shape& shape) {
  const Shape& scale = found.shape_of("scale");
  const std::uint64_t rows = shape[0], cols = shape[1];
  if (found.part("scale")->entry->elements == 1 && rows != 1) {
    found.set_shape(shape, {rows, cols});
    return cols;
  }
  const bool by_row = scale == Shape{rows};
  const std::uint64_t groups = by_row ? 1 : scale.size() == 2 && scale[0] == rows ? scale[1] : 0;
  if (groups == 0 || cols % groups != 0 || cols == 0) {
    std::string text;
    for (const std::uint64_t size : scale)
      text += (text.empty() ? "" : ", ") + std::to_string(size);
    found.fail("scale has the shape [" + text + "], wanted [" + std::to_string(rows) +
               ", groups] with groups that divide rows of " + std::to_string(cols));
  }
  found.set_shape(shape, {1, cols / groups});
  return cols / groups;
}

// 4 or 8, by the words of a row of `cols` elements. Both fit rows of four elements or fewer.
std::optional<int> bits_of_row(std::uint64_t words, std::uint64_t cols) {
  const bool four = words == ceil_div(cols, 8), eight = words == ceil_div(cols, 4);
  if (four == eight) return std::nullopt;
  return four ? 4 : 8;
}

// Calls visit(weights) for every group of config.json whose weights are integers.
template <class Visit>
void each_integer_group(const Candidate& found, Visit visit) {
  const json::Value* config = found.config();
  const json::Value* quantization = config ? config->find("quantization_config") : nullptr;
  const json::Value* groups = quantization ? quantization->find("config_groups") : nullptr;
  if (groups == nullptr || !groups->is(json::Kind::kObject)) return;
  for (const auto& [name, group] : groups->members()) {
    const json::Value* weights = group.is(json::Kind::kObject) ? group.find("weights") : nullptr;
    if (weights == nullptr || !weights->is(json::Kind::kObject)) continue;
    const json::Value* type = weights->find("type");
    if (type != nullptr && type->as_string() == "int") visit(*weights);
  }
}

// Without its zero points an asymmetric weight would be read as a symmetric one.
void want_zero_points(const Candidate& found) {
  std::size_t symmetric = 0, asymmetric = 0;
  each_integer_group(found, [&](const json::Value& weights) {
    const json::Value* stated = weights.find("symmetric");
    const bool says_no = stated != nullptr && stated->as_bool() == false;
    ++(says_no ? asymmetric : symmetric);
  });
  if (asymmetric > 0 && symmetric == 0)
    found.fail("there is no zero_point, and config_groups says symmetric: false");
}

// Whether config.json, where it states widths of integers, states this one and no other than 4 and
// 8: in older files seven bits have the words of eight.
bool config_allows(const Candidate& found, int bits) {
  bool stated = false, any = false, others = false;
  each_integer_group(found, [&](const json::Value& weights) {
    const json::Value* width = weights.find("num_bits");
    if (width == nullptr) return;
    const std::uint64_t number = width->as_unsigned().value_or(0);
    others = others || (number != 4 && number != 8);
    any = true;
    stated = stated || number == static_cast<std::uint64_t>(bits);
  });
  return !others && (stated || !any);
}

// Where quant_method says "monograph", every weight has its columns; elsewhere none has, since
// programs that know the other methods would not read them.
void want_columns(const Candidate& found) {
  const json::Value* quantization =
      found.config() ? found.config()->find("quantization_config") : nullptr;
  const json::Value* method = quantization && quantization->is(json::Kind::kObject)
                                  ? quantization->find("quant_method")
                                  : nullptr;
  if (method == nullptr) return;
  const bool wanted = method->as_string() == "monograph";
  if (wanted == (found.part("columns") != nullptr)) return;
  found.fail(wanted ? "there is no columns"
                    : "there is a columns, and quant_method is '" +
                          std::string(method->as_string().value_or("")) + "', wanted 'monograph'");
}

// The order of columns, empty if it is that of the weight. Throws Error unless each is there once.
std::vector<std::uint32_t> stored_columns(const Candidate& found, std::uint64_t cols) {
  const Shape shape = {cols};
  found.want_dtype("columns", StoredDType::kI32);
  found.want_shape("columns", shape);
  const std::uint8_t* bytes = found.part("columns")->bytes().data();
  std::vector<std::uint32_t> out(cols);
  std::vector<bool> seen(cols);
  bool in_order = true;
  for (std::size_t i = 0; i < cols; ++i) {
    std::int32_t at;
    std::memcpy(&at, bytes + 4 * i, 4);
    if (at < 0 || static_cast<std::uint64_t>(at) >= cols || seen[static_cast<std::size_t>(at)]) {
      found.fail("columns has " + std::to_string(at) + " at " + std::to_string(i) +
                 ", wanted each of 0 to " + std::to_string(cols - 1) + " once");
    }
    seen[static_cast<std::size_t>(at)] = true;
    out[i] = static_cast<std::uint32_t>(at);
    in_order = in_order && out[i] == i;
  }
  return in_order ? std::vector<std::uint32_t>() : out;
}

}  // namespace

void describe_packed_integers(const Candidate& found) {
  Weight& weight = found.weight();
  const Shape& words = found.shape_of("values");
  const Shape shape = stated_shape(found);
  if (words.size() != 2 || words[0] != shape[0] || shape[1] > words[1] * 32) {
    found.fail("values do not have the " + std::to_string(shape[0]) + " rows of " +
               std::to_string(shape[1]) + " elements that shape says");
  }
  const std::optional<int> bits = bits_of_row(words[1], shape[1]);
  if (!bits || !config_allows(found, *bits)) {
    weight.format = "int-packed";
    return found.set_shape(shape, {1, shape[1]});
  }
  weight.format = *bits == 4 ? "int4" : "int8";
  const std::uint64_t group = set_groups(found, shape);
  const Format format =
      with_scales(found, *bits == 4 ? Format::kInt4Bf16 : Format::kInt8PackedBf16);
  weight.dtype = found.dtype_of("scale");
  if (found.part("g_idx") != nullptr) {
    weight.format = "int-g_idx";
    return;
  }
  want_columns(found);
  if (found.part("columns") != nullptr) weight.columns = stored_columns(found, shape[1]);
  if (found.part("zero_point") == nullptr) {
    want_zero_points(found);
    return found.bind(format, {"scale"});
  }
  found.want_dtype("zero_point", StoredDType::kI32);
  const auto rows = ceil_div(shape[0] * static_cast<std::uint64_t>(*bits), 32);
  const Shape zeros = {rows, shape[1] / group};
  found.want_shape("zero_point", zeros);
  found.bind(format, {"scale", "zero_point"});
}

void describe_int8(const Candidate& found) {
  Weight& weight = found.weight();
  const Shape& shape = found.shape_of("values");
  if (shape.size() != 2) found.fail("values have no rows and columns");
  set_groups(found, shape);
  const Format format = with_scales(found, Format::kInt8Bf16);
  weight.dtype = found.dtype_of("scale");
  if (found.part("zero_point") == nullptr) {
    want_zero_points(found);
    return found.bind(format, {"scale"});
  }
  found.want_dtype("zero_point", StoredDType::kI8);
  const Shape& scale = found.shape_of("scale");
  found.want_shape("zero_point", scale);
  found.bind(format, {"scale", "zero_point"});
}

void bind_fp8_rows(const Candidate& found) {
  if (found.shape_of("values").size() != 2) return;
  const StoredDType scale = found.dtype_of("scale");
  const bool known =
      scale == StoredDType::kBF16 || scale == StoredDType::kF16 || scale == StoredDType::kF32;
  if (known) found.bind(with_scales(found, Format::kFp8RowBf16), {"scale"});
}

}  // namespace monograph
