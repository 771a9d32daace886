#include "monograph/quant_methods/shared_layouts.h"

#include "monograph/formats/bind.h"
#include "monograph/quant_methods/group_layouts.h"

namespace monograph {
namespace {

using safetensors::StoredDType;
using Shape = std::vector<std::uint64_t>;

// Two elements a byte along the last dimension, `block` of them to a scale.
void describe_rows_of_nibbles(const Candidate& found, std::uint64_t block) {
  Shape shape = found.shape_of("values");
  if (shape.size() < 2) found.fail("values have no rows");
  shape.back() *= 2;
  Shape scales = shape;
  if (shape.back() % block != 0) {
    found.fail("rows of " + std::to_string(shape.back()) + " are not whole blocks of " +
               std::to_string(block));
  }
  scales.back() /= block;
  found.want_shape("scale", scales);
  found.set_shape(std::move(shape), {1, block});
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
  const StoredDType dtype = found.dtype_of("scale");
  return dtype == StoredDType::kF32 || dtype == StoredDType::kBF16 || found.scale_is_e8m0();
}

}  // namespace

void describe_nvfp4(const Candidate& found, Format format) {
  const std::uint64_t scales = found.part("global_scale")->entry->elements;
  const Shape& values = found.shape_of("values");
  // A stack of experts has one for each.
  const std::uint64_t matrices = values.size() == 3 ? values[0] : 1;
  if (scales != 1 && scales != matrices) {
    found.fail("global scale has " + std::to_string(scales) + " elements, wanted " +
               (matrices == 1 ? "1" : "1 or " + std::to_string(matrices)));
  }
  found.want_dtype("global_scale", StoredDType::kF32);
  describe_rows_of_nibbles(found, 16);
  found.bind(format, {"scale", "global_scale"});
}

void describe_mxfp4(const Candidate& found) {
  describe_rows_of_nibbles(found, 32);
  found.bind(Format::kMxfp4, {"scale"});
}

void describe_fp8(const Candidate& found) {
  Weight& weight = found.weight();
  const Shape &shape = found.shape_of("values"), &scale = found.shape_of("scale");
  if (shape.size() < 2) found.fail("values have no rows");
  const std::uint64_t rows = shape[shape.size() - 2], cols = shape.back();
  const auto with_rows_and_cols = [&](std::uint64_t r, std::uint64_t c) {
    Shape wanted = shape;
    wanted[shape.size() - 2] = r;
    wanted.back() = c;
    return wanted;
  };
  if (found.scale_is_e8m0() && cols % 32 == 0 && scale == with_rows_and_cols(rows, cols / 32)) {
    weight.format = "mxfp8";
    found.set_shape(shape, {1, 32});
    return found.bind(Format::kMxfp8, {"scale"});
  }
  const Shape block = fp8_block(found);
  if (scale == with_rows_and_cols(tiles(rows, block[0]), tiles(cols, block[1]))) {
    weight.format = "fp8-block";
    found.set_shape(shape, block);
    const FormatInfo& info = *find_format(Format::kFp8Block);
    const bool decodable = block[0] == block[1] && block_fits(info, block[0]);
    if (decodable && has_fp8_block_scales(found)) found.bind(Format::kFp8Block, {"scale"});
    return;
  }
  weight.format = "fp8";
  if (found.part("scale")->entry->elements == 1) {
    found.set_shape(shape, {rows, cols});
    return bind_fp8_rows(found);
  }
  if (scale == with_rows_and_cols(rows, 1) || scale == Shape{rows}) {
    found.set_shape(shape, {1, cols});
    return bind_fp8_rows(found);
  }
  found.fail("scale fits neither blocks of " + std::to_string(block[0]) + " x " +
             std::to_string(block[1]) + ", rows of 32, rows, nor the whole weight");
}

}  // namespace monograph
