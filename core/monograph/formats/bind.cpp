#include "monograph/formats/bind.h"

#include <string>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"

namespace monograph {
namespace {

std::string text(std::size_t n) { return std::to_string(n); }

std::string text(std::span<const std::size_t> shape) {
  std::string list;
  for (const std::size_t size : shape) list += (list.empty() ? "" : ", ") + text(size);
  return "[" + list + "]";
}

const std::uint8_t* sized(const std::string& what, ByteSpan bytes, std::size_t want) {
  if (bytes.size != want)
    throw Error(what + " has " + text(bytes.size) + " bytes, wanted " + text(want));
  return bytes.data;
}

// Which of the format's kinds has this many bytes.
ScaleKind kind_of(const FormatInfo& info, ByteSpan bytes, std::size_t blocks) {
  std::string wanted;
  for (const ScaleKind kind : info.kinds) {
    if (bytes.size == blocks * size_bytes(kind)) return kind;
    if (!wanted.empty()) wanted += " or ";
    wanted += text(blocks * size_bytes(kind));
    if (info.kinds.size() > 1) wanted += std::string(" (") + name_of(kind) + ")";
  }
  const char* name = info.shape == BlockShape::kFlat ? "absmax" : "block scales";
  throw Error(std::string("scales[0] (") + name + ") has " + text(bytes.size) + " bytes, wanted " +
              wanted);
}

ScalesView double_quantised(std::span<const ByteSpan> scales, std::size_t blocks) {
  ScalesView view;
  view.blocks = sized("scales[0] (absmax codes)", scales[0], blocks);
  view.groups = sized("scales[1] (groups)", scales[1], 4 * ceil_div(blocks, kScaleGroup));
  view.map = sized("scales[2] (map)", scales[2], 4 * 256);
  view.offset = load_f32(sized("scales[3] (offset)", scales[3], 4));
  return view;
}

ScalesView bind_scales(const FormatInfo& info, const MatrixShape& shape, std::size_t block,
                       std::span<const ByteSpan> scales) {
  const std::size_t blocks = block_count(info.shape, block, shape.matrices, shape.rows, shape.cols);
  const bool tensor = info.tensor_scale != TensorScale::kNone;
  const std::size_t more = tensor ? 2 : info.double_quant ? 4 : 1;
  if (scales.size() != 1 && scales.size() != more)
    throw Error("scales has " + text(scales.size()) + " tensors, format " + info.name + " wants 1" +
                (tensor ? " (blocks) or 2 (blocks, tensor)"
                 : info.double_quant
                     ? " (plain) or 4 (double-quantised: absmax, groups, map, offset)"
                     : ""));
  if (scales.size() == 4) return double_quantised(scales, blocks);
  ScalesView view;
  view.kind = kind_of(info, scales[0], blocks);
  view.blocks = scales[0].data;
  if (scales.size() == 2) {
    const bool each = shape.matrices > 1 && scales[1].size == 4 * shape.matrices;
    view.tensor = sized("scales[1] (tensor)", scales[1], each ? scales[1].size : 4);
    view.blocks_per_tensor = each ? blocks / shape.matrices : 0;
    view.tensor_divides = info.tensor_scale == TensorScale::kDivides;
  }
  return view;
}

}  // namespace

MatrixShape matrix_shape(const FormatInfo& info, std::size_t block,
                         std::span<const std::size_t> shape) {
  MatrixShape result;
  std::size_t elements = 1;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (__builtin_mul_overflow(elements, shape[i] == 0 ? 1 : shape[i], &elements) ||
        elements > kMostElements)
      throw Error("the shape " + text(shape) + " has too many elements, wanted at most 2^56");
    const std::size_t left = shape.size() - i;
    (left == 1 ? result.cols : left == 2 ? result.rows : result.matrices) *= shape[i];
  }
  if (info.shape == BlockShape::kRow && result.cols % block != 0)
    throw Error("rows have " + text(result.cols) + " elements, format " + info.name +
                " wants a multiple of " + text(block));
  return result;
}

PackedView bind_packed(const FormatInfo& info, std::size_t block,
                       std::span<const std::size_t> shape, ByteSpan values,
                       std::span<const ByteSpan> scales) {
  if (!block_fits(info, block))
    throw Error("block size is " + text(block) + ", format " + info.name +
                " wants a power of two from " + text(info.smallest_block) + " to " +
                text(info.largest_block));
  const MatrixShape matrix = matrix_shape(info, block, shape);
  PackedView view;
  view.format = info.kernels;
  view.block = block;
  view.cols = matrix.cols;
  view.rows = matrix.matrices * matrix.rows;
  if (matrix.matrices > 1) view.matrix_rows = matrix.rows;
  view.values = sized("values", values, packed_bytes(info, matrix.elements()));
  view.scales = bind_scales(info, matrix, block, scales);
  return view;
}

}  // namespace monograph
