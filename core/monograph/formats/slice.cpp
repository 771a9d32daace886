#include "monograph/formats/slice.h"

#include <string>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"

namespace monograph {
namespace {

std::string wanted(std::size_t first, std::size_t count) {
  return "rows from " + std::to_string(first) + " on, " + std::to_string(count) +
         " of them, are wanted; ";
}

void check_rows(std::size_t rows, std::size_t first, std::size_t count) {
  if (first > rows || count > rows - first)
    throw Error(wanted(first, count) + "the weight has " + std::to_string(rows) + " rows");
}

// Rows that lie in matrix `matrix` alone: `values` and `scales` begin with that matrix.
PackedView of_matrix(PackedView weight, const FormatInfo& info, std::size_t matrix) {
  const std::size_t elements = weight.matrix_rows * weight.cols;
  const std::size_t blocks =
      block_count(info.shape, weight.block, 1, weight.matrix_rows, weight.cols);
  weight.values += matrix * packed_bytes(info, elements);
  weight.scales.blocks += matrix * blocks * size_bytes(weight.scales.kind);
  if (weight.scales.blocks_per_tensor != 0) weight.scales.tensor += 4 * matrix;
  weight.scales.blocks_per_tensor = 0;
  weight.origin -= matrix * elements;
  weight.matrix_rows = 0;
  return weight;
}

}  // namespace

PackedView slice_rows(const PackedView& weight, std::size_t first, std::size_t count) {
  check_rows(weight.rows, first, count);
  PackedView part = weight;
  part.origin += first * weight.cols;
  part.rows = count;
  const FormatInfo* info = find_format(weight.format);
  // Flat blocks and their groups run on from matrix to matrix.
  if (info == nullptr || info->shape == BlockShape::kFlat) return part;
  if (weight.matrix_rows == 0 || count == 0 || weight.cols == 0) return part;
  const std::size_t row = part.origin_row(), matrix = row / weight.matrix_rows;
  if ((row + count - 1) / weight.matrix_rows != matrix) return part;
  return of_matrix(part, *info, matrix);
}

PackedView PackedGrids::grid(std::size_t i) const {
  MONOGRAPH_ASSERT(i < count);
  PackedView view = first;
  view.values += i * value_bytes;
  if (view.odd_values != nullptr) view.odd_values += i * value_bytes;
  view.scales.blocks += i * block_bytes;
  if (view.scales.groups != nullptr) view.scales.groups += i * group_bytes;
  if (view.scales.zeros != nullptr) view.scales.zeros += i * zero_bytes;
  if (view.scales.offset_on_device != nullptr && offsets != nullptr)
    view.scales.offset_on_device = offsets + 4 * i;
  else if (offsets != nullptr)
    view.scales.offset = load_f32(offsets + 4 * i);
  if (tensor_each) view.scales.tensor += 4 * i;
  return view;
}

PackedView slice_rows(const PackedGrids& weight, std::size_t first, std::size_t count) {
  check_rows(weight.rows(), first, count);
  const std::size_t each = weight.first.rows;
  if (weight.count == 1) return slice_rows(weight.first, first, count);
  if (count == 0) return slice_rows(weight.first, 0, 0);
  const std::size_t grid = first / each;
  if (first % each + count > each)
    throw Error(wanted(first, count) + "they lie in more than one grid of " + std::to_string(each) +
                " rows");
  return slice_rows(weight.grid(grid), first % each, count);
}

PackedGrids alternating(const PackedGrids& even, const PackedGrids& odd) {
  const PackedView &a = even.first, &b = odd.first;
  const FormatInfo* info = find_format(a.format);
  const FormatInfo* other = find_format(b.format);
  const auto name = [](const FormatInfo* found) {
    return found == nullptr ? "plain" : found->name;
  };
  if (info != other || info == nullptr || info->shape != BlockShape::kInterleaved)
    throw Error(std::string("rows of ") + name(info) + " and of " + name(other) +
                " cannot alternate, wanted one format of ggml's blocks");
  if (even.count != odd.count || a.rows != b.rows || a.cols != b.cols)
    throw Error("stacks of " + std::to_string(even.count) + " x " + std::to_string(a.rows) + " x " +
                std::to_string(a.cols) + " and " + std::to_string(odd.count) + " x " +
                std::to_string(b.rows) + " x " + std::to_string(b.cols) +
                " cannot alternate, wanted both alike");
  const auto has_order = [](const PackedView& view) {
    return view.row_map != nullptr || view.odd_values != nullptr || view.origin != 0;
  };
  if (has_order(a) || has_order(b))
    throw Error("rows of two stacks cannot alternate where one has a row map or an origin");
  PackedGrids both = even;
  both.first.rows *= 2;
  both.first.odd_values = b.values;
  return both;
}

}  // namespace monograph
