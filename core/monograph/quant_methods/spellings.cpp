#include "monograph/quant_methods/spellings.h"

#include <algorithm>

#include "monograph/base/error.h"
#include "monograph/formats/bind.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

using safetensors::LocatedTensor;
using safetensors::StoredDType;
using Shape = std::vector<std::uint64_t>;

StoredDType dtype_of_part(const Candidate& found, std::string_view role) {
  const LocatedTensor* part = found.part(role);
  return part == nullptr ? StoredDType::kBool : part->entry->dtype;
}
const Shape& shape_of(const Candidate& found, std::string_view role) {
  return found.part(role)->entry->shape;
}
bool values_are(const Candidate& found, StoredDType dtype) {
  return dtype_of_part(found, "values") == dtype;
}
bool scale_is_e8m0(const Candidate& found) {
  const StoredDType dtype = dtype_of_part(found, "scale");
  return dtype == StoredDType::kU8 || dtype == StoredDType::kF8E8M0;
}

bool is_stack(const Candidate& found) { return shape_of(found, "values").size() == 3; }

void set_shape(const Candidate& found, Shape shape, Shape block) {
  Weight& weight = found.weight();
  weight.elements = 1;
  // No overflow: at most twice the elements of the values, which are in the file.
  for (const std::uint64_t dimension : shape) weight.elements *= dimension;
  weight.shape = std::move(shape);
  weight.block = std::move(block);
}

// Two elements a byte along the last dimension, `block` of them to a scale.
void describe_rows_of_nibbles(const Candidate& found, std::uint64_t block) {
  Shape shape = shape_of(found, "values");
  if (shape.size() < 2) found.fail("values have no rows");
  shape.back() *= 2;
  Shape scales = shape;
  if (shape.back() % block != 0) {
    found.fail("rows of " + std::to_string(shape.back()) + " are not whole blocks of " +
               std::to_string(block));
  }
  scales.back() /= block;
  found.want_shape("scale", scales);
  set_shape(found, std::move(shape), {1, block});
}

// ModelOpt stores what multiplies, compressed-tensors what divides.
template <Format kFormat>
void describe_nvfp4(const Candidate& found) {
  const std::uint64_t scales = found.part("global_scale")->entry->elements;
  const Shape& values = shape_of(found, "values");
  // A stack of experts has one for each.
  const std::uint64_t matrices = values.size() == 3 ? values[0] : 1;
  if (scales != 1 && scales != matrices) {
    found.fail("global scale has " + std::to_string(scales) + " elements, wanted " +
               (matrices == 1 ? "1" : "1 or " + std::to_string(matrices)));
  }
  found.want_dtype("global_scale", StoredDType::kF32);
  describe_rows_of_nibbles(found, 16);
  found.bind(kFormat, {"scale", "global_scale"});
}

void describe_mxfp4(const Candidate& found) {
  describe_rows_of_nibbles(found, 32);
  found.bind(Format::kMxfp4, {"scale"});
}

// blocks [E, rows, groups, 16] and scales [E, rows, groups].
void describe_gpt_oss(const Candidate& found) {
  const Shape& values = shape_of(found, "values");
  if (values.size() < 3 || values.back() != 16) {
    found.fail("blocks must have the shape [..., rows, groups, 16]");
  }
  Shape scales(values.begin(), values.end() - 1);
  found.want_shape("scale", scales);
  Shape shape(scales.begin(), scales.end() - 1);
  shape.push_back(scales.back() * 32);
  set_shape(found, std::move(shape), {1, 32});
  found.bind(Format::kMxfp4, {"scale"});
}

// The block that config.json states, else 128 x 128.
Shape fp8_block(const Candidate& found) {
  const json::Value* config = found.config();
  const json::Value* quantization = config ? config->find("quantization_config") : nullptr;
  const json::Value* block = quantization ? quantization->find("weight_block_size") : nullptr;
  if (block == nullptr || block->is(json::Kind::kNull)) return {128, 128};
  Shape sizes;
  for (const json::Value& item : block->items()) sizes.push_back(item.as_unsigned().value_or(0));
  if (sizes.size() != 2 || sizes[0] == 0 || sizes[1] == 0) {
    found.fail("weight_block_size in config.json must be two numbers above 0");
  }
  return sizes;
}

std::uint64_t tiles(std::uint64_t size, std::uint64_t tile) {
  return size / tile + (size % tile != 0 ? 1 : 0);
}

// Types that the format knows; fp16 has the size of bf16 and would be taken for it.
bool has_fp8_block_scales(const Candidate& found) {
  const StoredDType dtype = dtype_of_part(found, "scale");
  return dtype == StoredDType::kF32 || dtype == StoredDType::kBF16 || scale_is_e8m0(found);
}

void describe_fp8(const Candidate& found) {
  Weight& weight = found.weight();
  const Shape shape = shape_of(found, "values"), scale = shape_of(found, "scale");
  if (shape.size() < 2) found.fail("values have no rows");
  const std::uint64_t rows = shape[shape.size() - 2], cols = shape.back();
  const auto with_rows_and_cols = [&](std::uint64_t r, std::uint64_t c) {
    Shape wanted = shape;
    wanted[shape.size() - 2] = r;
    wanted.back() = c;
    return wanted;
  };
  if (scale_is_e8m0(found) && cols % 32 == 0 && scale == with_rows_and_cols(rows, cols / 32)) {
    weight.format = "mxfp8";
    set_shape(found, shape, {1, 32});
    return found.bind(Format::kMxfp8, {"scale"});
  }
  const Shape block = fp8_block(found);
  if (scale == with_rows_and_cols(tiles(rows, block[0]), tiles(cols, block[1]))) {
    weight.format = "fp8-block";
    set_shape(found, shape, block);
    const FormatInfo& info = *find_format(Format::kFp8Block);
    const bool decodable = block[0] == block[1] && block_fits(info, block[0]);
    if (decodable && has_fp8_block_scales(found)) found.bind(Format::kFp8Block, {"scale"});
    return;
  }
  weight.format = "fp8";
  if (found.part("scale")->entry->elements == 1) return set_shape(found, shape, {rows, cols});
  if (scale == with_rows_and_cols(rows, 1) || scale == Shape{rows}) {
    return set_shape(found, shape, {1, cols});
  }
  found.fail("scale fits neither blocks of " + std::to_string(block[0]) + " x " +
             std::to_string(block[1]) + ", rows of 32, rows, nor the whole weight");
}

void describe_int8(const Candidate& found) {
  const Shape shape = shape_of(found, "values");
  if (shape.size() != 2) found.fail("values must have two dimensions");
  found.want_shape("scale", std::array{shape[0]});
  set_shape(found, shape, {1, shape[1]});
}

// The first row that matches counts: the more exact before the more general.
constexpr std::array kSpellings = {
    Spelling{"bitsandbytes",
             "nf4",
             "",
             "",
             {{{".quant_state.bitsandbytes__nf4", "quant_state", true},
               {".absmax", "absmax", true},
               {".quant_map", "quant_map"},
               {".nested_absmax", "nested_absmax"},
               {".nested_quant_map", "nested_quant_map"}}},
             [](const Candidate&) { return true; },
             [](const Candidate& found) { describe_bitsandbytes(found, Format::kNf4); }},
    Spelling{"bitsandbytes",
             "fp4",
             "",
             "",
             {{{".quant_state.bitsandbytes__fp4", "quant_state", true},
               {".absmax", "absmax", true},
               {".quant_map", "quant_map"},
               {".nested_absmax", "nested_absmax"},
               {".nested_quant_map", "nested_quant_map"}}},
             [](const Candidate&) { return true; },
             [](const Candidate& found) { describe_bitsandbytes(found, Format::kFp4); }},
    Spelling{"bitsandbytes",
             "int8",
             ".weight",
             ".weight",
             {{{".SCB", "scale", true}, {".weight_format", "weight_format"}}},
             [](const Candidate& found) { return values_are(found, StoredDType::kI8); },
             describe_int8},
    Spelling{"ModelOpt",
             "nvfp4",
             ".weight",
             ".weight",
             {{{".weight_scale", "scale", true},
               {".weight_scale_2", "global_scale", true},
               {".input_scale", "input_scale"}}},
             [](const Candidate& found) {
               return values_are(found, StoredDType::kU8) &&
                      dtype_of_part(found, "scale") == StoredDType::kF8E4M3;
             },
             describe_nvfp4<Format::kNvfp4>},
    Spelling{"compressed-tensors",
             "nvfp4",
             ".weight_packed",
             ".weight",
             {{{".weight_scale", "scale", true},
               {".weight_global_scale", "global_scale", true},
               {".input_global_scale", "input_scale"}}},
             [](const Candidate& found) {
               return values_are(found, StoredDType::kU8) &&
                      dtype_of_part(found, "scale") == StoredDType::kF8E4M3;
             },
             describe_nvfp4<Format::kNvfp4Divide>},
    Spelling{"compressed-tensors",
             "mxfp4",
             ".weight_packed",
             ".weight",
             {{{".weight_scale", "scale", true}}},
             [](const Candidate& found) {
               return values_are(found, StoredDType::kU8) && scale_is_e8m0(found);
             },
             describe_mxfp4},
    Spelling{"gpt-oss",
             "mxfp4",
             "_blocks",
             "",
             {{{"_scales", "scale", true}}},
             [](const Candidate& found) {
               return values_are(found, StoredDType::kU8) && scale_is_e8m0(found);
             },
             describe_gpt_oss},
    Spelling{"gpt-oss",
             "mxfp4",
             ".blocks",
             "",
             {{{".scales", "scale", true}}},
             [](const Candidate& found) {
               return values_are(found, StoredDType::kU8) && scale_is_e8m0(found);
             },
             describe_gpt_oss},
    Spelling{"DeepSeek",
             "mxfp4",
             ".weight",
             ".weight",
             {{{".weight_scale_inv", "scale", true}}},
             [](const Candidate& found) {
               return values_are(found, StoredDType::kI8) && scale_is_e8m0(found);
             },
             describe_mxfp4},
    Spelling{"DeepSeek",
             "fp8-block",
             ".weight",
             ".weight",
             {{{".weight_scale_inv", "scale", true}, {".input_scale", "input_scale"}}},
             [](const Candidate& found) { return values_are(found, StoredDType::kF8E4M3); },
             describe_fp8},
    Spelling{"compressed-tensors",
             "fp8",
             ".weight",
             ".weight",
             {{{".weight_scale", "scale", true}, {".input_scale", "input_scale"}}},
             [](const Candidate& found) { return values_are(found, StoredDType::kF8E4M3); },
             describe_fp8},
    // Stacks of experts: the endings of the rows above behind the name of a 3-D parameter.
    Spelling{"Monograph",
             "nvfp4",
             "_packed",
             "",
             {{{"_scale", "scale", true}, {"_global_scale", "global_scale", true}}},
             [](const Candidate& found) {
               return is_stack(found) && values_are(found, StoredDType::kU8) &&
                      dtype_of_part(found, "scale") == StoredDType::kF8E4M3;
             },
             describe_nvfp4<Format::kNvfp4Divide>},
    Spelling{"Monograph",
             "mxfp4",
             "_packed",
             "",
             {{{"_scale", "scale", true}}},
             [](const Candidate& found) {
               return is_stack(found) && values_are(found, StoredDType::kU8) &&
                      scale_is_e8m0(found);
             },
             describe_mxfp4},
    Spelling{"transformers",
             "fp8-block",
             "",
             "",
             {{{"_scale_inv", "scale", true}}},
             [](const Candidate& found) {
               return is_stack(found) && values_are(found, StoredDType::kF8E4M3);
             },
             describe_fp8},
    Spelling{"Monograph",
             "mxfp8",
             "",
             "",
             {{{"_scale", "scale", true}}},
             [](const Candidate& found) {
               return is_stack(found) && values_are(found, StoredDType::kF8E4M3) &&
                      scale_is_e8m0(found);
             },
             describe_fp8},
};

std::string text_of(std::span<const std::uint64_t> shape) {
  std::string text = "[";
  for (const std::uint64_t dimension : shape) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(dimension);
  }
  return text + "]";
}

}  // namespace

std::span<const Spelling> spellings() { return kSpellings; }

std::vector<std::string_view> weight_formats() {
  // describe_fp8 says more exactly which one it is.
  std::vector<std::string_view> names = {"nf4", "nf4+dq", "fp4", "fp4+dq", "mxfp8"};
  const auto add = [&](std::string_view name) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  for (const Spelling& spelling : kSpellings) add(spelling.format);
  for (std::size_t i = 0; i < safetensors::kStoredDTypes.size(); ++i) {
    add(short_name(static_cast<StoredDType>(i)));
  }
  return names;
}

const LocatedTensor* Candidate::part(std::string_view role) const {
  const auto found = std::find_if(weight_.parts.begin(), weight_.parts.end(),
                                  [&](const Part& part) { return part.role == role; });
  return found == weight_.parts.end() ? nullptr : &found->tensor;
}

void Candidate::bind(Format format, std::initializer_list<std::string_view> scale_roles) const {
  const auto bytes_of = [&](std::string_view role) {
    const auto bytes = part(role)->bytes();
    return ByteSpan{bytes.data(), bytes.size()};
  };
  std::vector<ByteSpan> scales;
  for (const std::string_view role : scale_roles) scales.push_back(bytes_of(role));
  const std::vector<std::size_t> shape(weight_.shape.begin(), weight_.shape.end());
  try {
    weight_.view =
        bind_packed(*find_format(format), weight_.block.back(), shape, bytes_of("values"), scales);
  } catch (const Error& error) {
    fail(error.what());
  }
}

void Candidate::fail(const std::string& what) const {
  const LocatedTensor& values = weight_.parts.front().tensor;
  throw Error(values.file->path().string() + ": weight " + text::in_quotes(weight_.name) + " (" +
              std::string(weight_.spelling) + " " + std::string(weight_.format) + "): " + what);
}

void Candidate::want_shape(std::string_view role, std::span<const std::uint64_t> shape) const {
  const std::vector<std::uint64_t>& found = part(role)->entry->shape;
  if (std::equal(found.begin(), found.end(), shape.begin(), shape.end())) return;
  fail(std::string(role) + " has the shape " + text_of(found) + ", wanted " + text_of(shape));
}

void Candidate::want_dtype(std::string_view role, StoredDType dtype) const {
  const StoredDType found = part(role)->entry->dtype;
  if (found == dtype) return;
  fail(std::string(role) + " is " + std::string(name_of(found)) + ", wanted " +
       std::string(name_of(dtype)));
}

}  // namespace monograph
