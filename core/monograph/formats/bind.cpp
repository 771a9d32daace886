#include "monograph/formats/bind.h"

#include <cstring>
#include <limits>
#include <string>
#include <vector>

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
  const std::uint8_t* offset = sized("scales[3] (offset)", scales[3], 4);
  const bool on_host = scales[3].memory == Memory::kHost;
  view.offset = on_host ? load_f32(offset) : std::numeric_limits<float>::quiet_NaN();
  if (!on_host) view.offset_on_device = offset;
  return view;
}

void check_block(const FormatInfo& info, std::size_t block) {
  if (!block_fits(info, block) && info.shape == BlockShape::kInterleaved)
    throw Error("block size is " + text(block) + ", format " + info.name + " wants " +
                text(info.largest_block));
  if (!block_fits(info, block) && info.shape == BlockShape::kGroup)
    throw Error("block size is " + text(block) + ", format " + info.name +
                " wants 1 or more, at most 2^56");
  if (!block_fits(info, block))
    throw Error("block size is " + text(block) + ", format " + info.name +
                " wants a power of two from " + text(info.smallest_block) + " to " +
                text(info.largest_block));
}

// With the elements or rows before the weight.
std::size_t blocks_of(const FormatInfo& info, const MatrixShape& shape, std::size_t block,
                      std::size_t origin) {
  if (origin == 0) return block_count(info.shape, block, shape.matrices, shape.rows, shape.cols);
  if (info.shape == BlockShape::kFlat) return ceil_div(origin + shape.elements(), block);
  return block_count(info.shape, block, 1, origin / shape.cols + shape.rows, shape.cols);
}

void check_origin(const FormatInfo& info, const MatrixShape& shape, std::size_t origin) {
  if (origin == 0) return;
  if (origin > kMostElements - shape.elements())
    throw Error("the origin is " + text(origin) + ", wanted at most 2^56 elements with the weight");
  if (info.shape == BlockShape::kFlat) return;
  if (shape.matrices != 1)
    throw Error("the origin is " + text(origin) + " and the weight has " + text(shape.matrices) +
                " matrices, format " + info.name + " wants one");
  if (shape.cols == 0 || origin % shape.cols != 0)
    throw Error("the origin is " + text(origin) + ", format " + info.name +
                " wants whole rows of " + text(shape.cols));
}

// {scales} or {scales, zero points} of `rows` rows, those before the origin too.
ScalesView group_scales(const FormatInfo& info, std::size_t rows, std::size_t groups,
                        std::span<const ByteSpan> scales) {
  const bool may_have_zeros = info.zero_points != ZeroPoints::kNone;
  if (scales.size() != 1 && !(may_have_zeros && scales.size() == 2))
    throw Error("scales has " + text(scales.size()) + " tensors, format " + info.name + " wants 1" +
                (may_have_zeros ? " (symmetric) or 2 (scales, zero points)" : ""));
  ScalesView view;
  view.kind = info.kinds[0];
  view.blocks = scales[0].data;
  view.one = scales[0].size == size_bytes(view.kind) && rows * groups != 1;
  if (!view.one)
    sized(std::string("scales[0] (") + name_of(view.kind) + ")", scales[0],
          rows * groups * size_bytes(view.kind));
  view.zero_points = info.zero_points;
  if (scales.size() == 2) {
    if (view.one)
      throw Error("scales[0] is one scale beside zero points, wanted " + text(rows * groups));
    view.zeros = sized("scales[1] (zero points)", scales[1], zero_point_bytes(info, rows, groups));
  }
  return view;
}

// {} or {row map}: int32, the stored row of each of `rows` rows. Returns the map, checked against
// the rows of `values` where it can be read.
const std::uint8_t* bind_row_map(const FormatInfo& info, std::size_t rows, std::size_t stored,
                                 std::span<const ByteSpan> scales) {
  if (scales.empty()) return nullptr;
  if (scales.size() != 1)
    throw Error("scales has " + text(scales.size()) + " tensors, format " + info.name +
                " wants none, or 1 (row map)");
  const std::uint8_t* map = sized("scales[0] (row map)", scales[0], 4 * rows);
  if (scales[0].memory != Memory::kHost) return map;
  std::uint32_t largest = 0;
  for (std::size_t row = 0; row < rows; ++row) {
    std::uint32_t at;
    std::memcpy(&at, map + 4 * row, sizeof at);
    largest = at > largest ? at : largest;
  }
  if (rows != 0 && largest >= stored)
    throw Error("scales[0] (row map) has the row " +
                std::to_string(static_cast<std::int32_t>(largest)) + ", values has " +
                text(stored) + " rows");
  return map;
}

// With a row map `values` may have rows that the weight has not.
void bind_interleaved(const FormatInfo& info, ByteSpan values, std::span<const ByteSpan> scales,
                      PackedView& view) {
  const std::size_t rows = view.origin_row() + view.rows;
  view.row_bytes = row_bytes(info, view.cols);
  const std::size_t whole = packed_bytes(info, rows, view.cols);
  if (scales.empty() || view.row_bytes == 0) {
    sized("values", values, whole);
  } else if (values.size % view.row_bytes != 0) {
    throw Error("values has " + text(values.size) + " bytes, wanted rows of " +
                text(view.row_bytes));
  }
  const std::size_t stored = view.row_bytes == 0 ? rows : values.size / view.row_bytes;
  view.values = values.data;
  view.row_map = bind_row_map(info, rows, stored, scales);
}

ScalesView bind_scales(const FormatInfo& info, const MatrixShape& shape, std::size_t blocks,
                       std::span<const ByteSpan> scales) {
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
  const bool whole = info.shape != BlockShape::kFlat && info.shape != BlockShape::kSquare;
  if (whole && result.cols % block != 0)
    throw Error("rows have " + text(result.cols) + " elements, format " + info.name +
                " wants a multiple of " + text(block));
  return result;
}

PackedView bind_packed(const FormatInfo& info, std::size_t block,
                       std::span<const std::size_t> shape, ByteSpan values,
                       std::span<const ByteSpan> scales, std::size_t origin) {
  check_block(info, block);
  const MatrixShape matrix = matrix_shape(info, block, shape);
  check_origin(info, matrix, origin);
  PackedView view;
  view.format = info.kernels;
  view.block = block;
  view.cols = matrix.cols;
  view.rows = matrix.matrices * matrix.rows;
  if (matrix.matrices > 1) view.matrix_rows = matrix.rows;
  view.origin = origin;
  if (info.shape == BlockShape::kGroup) {
    if (matrix.matrices != 1)
      throw Error("the weight has " + text(matrix.matrices) + " matrices, format " + info.name +
                  " wants one");
    const std::size_t rows = view.origin_row() + view.rows;
    view.row_bytes = row_bytes(info, matrix.cols);
    view.values = sized("values", values, packed_bytes(info, rows, matrix.cols));
    view.scales = group_scales(info, rows, matrix.cols / block, scales);
    return view;
  }
  if (info.shape == BlockShape::kInterleaved) {
    if (matrix.matrices != 1)
      throw Error("the weight has " + text(matrix.matrices) + " matrices, format " + info.name +
                  " wants one");
    bind_interleaved(info, values, scales, view);
    return view;
  }
  view.values = sized("values", values, packed_bytes(info, origin + matrix.elements()));
  view.scales = bind_scales(info, matrix, blocks_of(info, matrix, block, origin), scales);
  return view;
}

PackedGrids bind_grids(const FormatInfo& info, std::size_t block,
                       std::span<const std::size_t> shape, std::size_t grid_rows, ByteSpan values,
                       std::span<const ByteSpan> scales) {
  check_block(info, block);
  if (info.shape == BlockShape::kInterleaved && !scales.empty())
    throw Error("the weight has a row map and grids of " + text(grid_rows) + " rows, format " +
                info.name + " wants one matrix, or rows in order");
  const MatrixShape matrix = matrix_shape(info, block, shape);
  const std::size_t rows = matrix.matrices * matrix.rows;
  if (grid_rows == 0 || rows == 0 || rows % grid_rows != 0)
    throw Error("a grid has " + text(grid_rows) + " rows, wanted a part of the weight's " +
                text(rows));
  PackedGrids grids;
  grids.count = rows / grid_rows;
  const auto share = [&](const std::string& what, ByteSpan bytes) {
    if (bytes.size % grids.count != 0)
      throw Error(what + " has " + text(bytes.size) + " bytes, wanted as many for each of the " +
                  text(grids.count) + " grids");
    return ByteSpan{bytes.data, bytes.size / grids.count};
  };
  const auto own = [&](ByteSpan bytes) {
    return grids.count > 1 && bytes.size == 4 * grids.count;  // else one number for all
  };
  const ByteSpan first_values = share("values", values);
  std::vector<ByteSpan> first(scales.begin(), scales.end());
  if (!first.empty()) first[0] = share("scales[0]", scales[0]);
  if (first.size() == 2 && info.shape == BlockShape::kGroup) {
    first[1] = share("scales[1]", scales[1]);
    grids.zero_bytes = first[1].size;
  } else if (first.size() == 2) {
    grids.tensor_each = own(scales[1]);
    if (grids.tensor_each) first[1].size = 4;
  }
  if (first.size() == 4) {
    first[1] = share("scales[1]", scales[1]);
    if (own(scales[3])) {
      grids.offsets = scales[3].data;
      first[3].size = 4;
    }
    grids.group_bytes = first[1].size;
  }
  grids.value_bytes = first_values.size;
  grids.block_bytes = first.empty() ? 0 : first[0].size;
  const std::size_t one[] = {grid_rows, matrix.cols};
  try {
    grids.first = bind_packed(info, block, one, first_values, first);
  } catch (const Error& error) {
    throw Error("one of " + text(grids.count) + " grids: " + error.what());
  }
  return grids;
}

}  // namespace monograph
