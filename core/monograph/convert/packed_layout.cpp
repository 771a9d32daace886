#include "monograph/convert/packed_layout.h"

#include <algorithm>
#include <array>

#include "monograph/base/error.h"
#include "monograph/formats/bind.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

std::uint64_t cols_of(const Weight& weight) {
  return weight.shape.empty() ? 1 : weight.shape.back();
}

}  // namespace

PackedLayout::PackedLayout(const Conversion& conversion)
    : PackedLayout(
          conversion,
          conversion.weight->elements / std::max<std::uint64_t>(cols_of(*conversion.weight), 1),
          cols_of(*conversion.weight)) {}

PackedLayout::PackedLayout(const Conversion& conversion, std::uint64_t rows, std::uint64_t cols)
    : info_(*find_format(conversion.format)),
      block_(conversion.block),
      rows_(rows),
      cols_(cols),
      nonfinite_(conversion.nonfinite) {
  try {
    matrix_shape(info_, block_, std::array<std::size_t, 2>{rows, cols});
  } catch (const Error& error) {
    throw Error("weight " + text::in_quotes(conversion.weight->name) + ": " + error.what());
  }
}

std::uint64_t PackedLayout::blocks() const {
  return block_count(info_.shape, block_, 1, rows_, cols_);
}

std::uint64_t PackedLayout::unit() const {
  return info_.shape == BlockShape::kSquare ? std::max<std::uint64_t>(block_ * cols_, 1) : block_;
}

std::uint64_t PackedLayout::range(std::uint64_t elements) const {
  return std::max<std::uint64_t>(elements / unit(), 1) * unit();
}

std::uint64_t PackedLayout::block_at(std::uint64_t begin) const {
  if (info_.shape != BlockShape::kSquare) return begin / block_;
  return begin / unit() * ceil_div(cols_, block_);
}

std::uint64_t PackedLayout::value_bytes(std::uint64_t elements) const {
  return packed_bytes(info_, elements);
}

QuantizeJob PackedLayout::job(DType dtype, const void* input, std::uint64_t count,
                              std::uint8_t* values, std::uint8_t* scales,
                              const TensorScales* tensor) const {
  QuantizeJob job = {info_.kernels, dtype, input, count, block_, nonfinite_, values, scales};
  job.rule = info_.rules.front();
  job.kind = kind();
  job.shape = info_.shape;
  job.matrix_rows = cols_ == 0 ? 0 : count / cols_;
  job.cols = cols_;
  if (info_.tensor_scale != TensorScale::kNone) {
    job.tensors = tensor;
    job.blocks_per_tensor = std::max<std::uint64_t>(job.blocks(), 1);
  }
  return job;
}

}  // namespace monograph
