// A packed weight as it crosses the operator boundary, checked once.
//
// Schema part shared by all formats:  Tensor values, Tensor[] scales, SymInt[] layout
//   values  uint8, packed elements, contiguous, any shape
//   scales  uint8 tensors, numbers as their bytes: [absmax] or, double-quantised, [absmax, groups,
//           map, offset]; [blocks] or, with a scale for the whole matrix, [blocks, tensor];
//           groups of a row: [blocks] or [blocks, zero points]
//   layout  [format, block, *shape]; the format is the number of monograph::Format. Or, told by its
//           negative first number, version 1: [-1, format, block, dimensions, *shape, origin,
//           grid_rows], with the origin and the rows of a grid of formats/bind.h; 0 for none.
#pragma once

#include <span>
#include <string>

#include "monograph/formats/slice.h"
#include "stable.h"

namespace monograph::ops {

struct Layout {
  std::int64_t format = 0, block = 0;
  std::vector<std::int64_t> shape;  // logical: (rows, cols) or (experts, rows, cols) ...
  std::size_t origin = 0, grid_rows = 0;
  bool versioned = false;
};

// The numbers of one layout.
Layout read_layout(const char* op, const std::vector<std::int64_t>& numbers);
// One of a list: reads from the front of `numbers`, which it moves. Without a version it has two
// dimensions.
Layout take_layout(const char* op, std::span<const std::int64_t>& numbers);

// Tells the memory of a base that is read ahead that a weight is about to be read; waits for it.
void note_weight(const Tensor& values, const std::vector<Tensor>& scales);

struct PackedArgument {
  PackedGrids weight;
  std::vector<std::int64_t> shape;
};

// Throws with the name of `op`, the thing, the value found and the value wanted. The tensors must
// outlive the weight.
PackedArgument check_packed(const char* op, const Tensor& values, const std::vector<Tensor>& scales,
                            const Layout& layout);

// The type of `out`, which has the shape of the weight and shares no memory with it.
DType check_output(const char* op, const Tensor& out, const PackedArgument& weight,
                   const Tensor& values, const std::vector<Tensor>& scales);

const FormatInfo& check_format(const char* op, const char* what, std::int64_t number);

}  // namespace monograph::ops
