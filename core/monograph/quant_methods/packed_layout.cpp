#include "monograph/quant_methods/packed_layout.h"

#include <algorithm>
#include <array>
#include <utility>

#include "monograph/base/error.h"
#include "monograph/formats/bind.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

// By the dimension from behind: 0 columns, 1 rows, all others matrices.
std::uint64_t cols_of(const Weight& weight) {
  return weight.shape.empty() ? 1 : weight.shape.back();
}
std::uint64_t rows_of(const Weight& weight) {
  return weight.shape.size() < 2 ? 1 : weight.shape[weight.shape.size() - 2];
}
std::uint64_t matrices_of(const Weight& weight) {
  std::uint64_t matrices = 1;
  for (std::size_t i = 2; i < weight.shape.size(); ++i) {
    matrices *= weight.shape[weight.shape.size() - 1 - i];
  }
  return matrices;
}

}  // namespace

PackedLayout::PackedLayout(const Conversion& conversion)
    : PackedLayout(conversion, matrices_of(*conversion.weight), rows_of(*conversion.weight),
                   cols_of(*conversion.weight)) {}

PackedLayout::PackedLayout(const Conversion& conversion, std::uint64_t matrices, std::uint64_t rows,
                           std::uint64_t cols)
    : info_(*find_format(conversion.format)),
      block_(conversion.block),
      matrices_(matrices),
      rows_(rows),
      cols_(cols),
      nonfinite_(conversion.nonfinite),
      rule_(conversion.rule == ScaleRule::kDefault ? info_.rules.front() : conversion.rule) {
  if (info_.shape != BlockShape::kSquare && info_.tensor_scale == TensorScale::kNone) {
    rows_ *= std::exchange(matrices_, 1);
  }
  try {
    if (info_.shape == BlockShape::kGroup && (matrices != 1 || conversion.stack != Stack::kNone)) {
      throw Error("has " + std::to_string(matrices) + " matrices, format " + info_.name +
                  " wants one");
    }
    matrix_shape(info_, block_, std::array<std::size_t, 3>{matrices, rows, cols});
    if (conversion.stack != Stack::kNone && info_.shape == BlockShape::kFlat &&
        rows * cols % block_ != 0) {
      throw Error("an expert has " + std::to_string(rows * cols) + " elements, format " +
                  info_.name + " wants a multiple of the block of " + std::to_string(block_));
    }
  } catch (const Error& error) {
    throw Error("weight " + text::in_quotes(conversion.weight->name) + ": " + error.what());
  }
}

std::uint64_t PackedLayout::blocks() const {
  return block_count(info_.shape, block_, matrices_, rows_, cols_);
}

std::uint64_t PackedLayout::unit() const {
  if (info_.shape == BlockShape::kGroup) return std::max<std::uint64_t>(cols_, 1);
  return info_.shape == BlockShape::kSquare ? std::max<std::uint64_t>(block_ * cols_, 1) : block_;
}

std::uint64_t PackedLayout::range(std::uint64_t elements) const {
  return std::max<std::uint64_t>(elements / unit(), 1) * unit();
}

std::uint64_t PackedLayout::block_at(std::uint64_t begin) const {
  if (info_.shape != BlockShape::kSquare) return begin / block_;
  const std::uint64_t per_row = ceil_div(cols_, block_);
  const std::uint64_t matrix = begin / std::max<std::uint64_t>(matrix_elements(), 1);
  const std::uint64_t within = begin - matrix * matrix_elements();
  return (matrix * ceil_div(rows_, block_) + within / unit()) * per_row;
}

std::uint64_t PackedLayout::value_bytes(std::uint64_t elements) const {
  if (info_.shape != BlockShape::kGroup) return packed_bytes(info_, elements);
  return cols_ == 0 ? 0 : elements / cols_ * row_bytes(info_, cols_);
}

QuantizeJob PackedLayout::job(DType dtype, const void* input, std::uint64_t count,
                              std::uint8_t* values, std::uint8_t* scales, std::uint8_t* zeros,
                              const TensorScales* tensor) const {
  QuantizeJob job = {info_.kernels, dtype, input, count, block_, nonfinite_, values, scales};
  job.rule = rule_;
  job.kind = kind();
  job.shape = info_.shape;
  job.matrix_rows = cols_ == 0 ? 0 : count / cols_;
  job.cols = cols_;
  if (info_.shape == BlockShape::kGroup) {
    job.row_bytes = row_bytes(info_, cols_);
    job.add_half = info_.zero_points == ZeroPoints::kPacked && info_.bits == 8;
    if (has_zero_points()) job.zeros = zeros;
  }
  if (info_.tensor_scale != TensorScale::kNone) {
    job.tensors = tensor;
    job.blocks_per_tensor = std::max<std::uint64_t>(job.blocks(), 1);
  }
  return job;
}

}  // namespace monograph
