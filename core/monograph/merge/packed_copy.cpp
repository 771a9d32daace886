#include "monograph/merge/packed_copy.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"
#include "monograph/formats/bind.h"
#include "monograph/formats/dynamic_map.h"
#include "monograph/formats/group_numbers.h"
#include "monograph/formats/zero_points.h"
#include "monograph/kernels/dequantize/dequantize.h"
#include "monograph/kernels/feedback_rounding/feedback_rounding.h"
#include "monograph/text/utf8.h"

namespace monograph {

PackedCopy::PackedCopy(const Conversion& conversion, std::size_t matrices, std::size_t rows,
                       std::size_t cols)
    : conversion_(conversion),
      layout_(conversion, matrices, rows, cols),
      shape_{matrices, rows, cols},
      values_(layout_.value_bytes(matrices * rows * cols)) {
  scales_.make_room(layout_);
}

void PackedCopy::set_largest(std::size_t matrix, float magnitude) {
  const FormatInfo& info = layout_.info();
  scales_.tensors[matrix] = tensor_scales_for(info.kernels, layout_.rule(), magnitude);
}

void PackedCopy::quantize(std::size_t at, DType dtype, const void* input, std::size_t count) {
  const QuantizeJob job =
      layout_.job(dtype, input, count, values_.data() + layout_.value_bytes(at),
                  scales_.at(layout_, layout_.block_at(at)), scales_.zeros_at(layout_.block_at(at)),
                  &scales_.tensor_at(layout_, at));
  const auto bad = monograph::quantize(job, serial_for);
  if (!bad) return;
  throw Error("weight " + text::in_quotes(conversion_.weight->name) + ": element " +
              std::to_string(at + *bad) + " is no finite number and cannot be quantised");
}

bool PackedCopy::has_packing_of(const PackedView& grid) const {
  const FormatInfo& info = layout_.info();
  return info.shape == BlockShape::kGroup && grid.format == info.kernels &&
         grid.rows == shape_[1] && grid.cols == shape_[2] && grid.block == conversion_.block &&
         grid.scales.kind == layout_.kind() &&
         (grid.scales.zeros != nullptr) == layout_.has_zero_points();
}

void PackedCopy::keep_scales(const PackedView& grid, std::size_t row, std::span<const float> base,
                             std::span<const double> merged) {
  const std::size_t block = conversion_.block, groups = shape_[2] / block;
  for (std::size_t begin = 0; begin < merged.size(); begin += block) {
    const std::size_t at = row * groups + begin / block;
    const GroupNumbers numbers = group_numbers(grid, at / groups, at % groups);
    const auto zero = static_cast<float>(numbers.zero);
    // Values of the base that are rounded to its type may lie further out.
    float lowest = numbers.lowest, highest = numbers.highest;
    double largest = 0.0, before = 0.0;
    for (std::size_t i = begin; i < begin + block; ++i) {
      const float number = base[i] / numbers.scale + zero;
      lowest = std::min(lowest, number);
      highest = std::max(highest, number);
      before = std::max<double>(before, std::fabs(base[i]));
    }
    bool fits = true;
    for (std::size_t i = begin; i < begin + block; ++i) {
      const float number = static_cast<float>(merged[i]) / numbers.scale + zero;
      fits = fits && number >= lowest && number <= highest;
      largest = std::max(largest, std::fabs(merged[i]));
    }
    if (fits && 2.0 * largest >= before) take_scale(grid, at);
  }
}

void PackedCopy::take_scale(const PackedView& grid, std::size_t at) {
  const std::size_t groups = shape_[2] / conversion_.block, width = layout_.scale_bytes();
  const std::size_t from = grid.scales.one ? 0 : at + grid.origin_row() * groups;
  std::memcpy(scales_.at(layout_, at), grid.scales.blocks + from * width, width);
  if (!layout_.has_zero_points()) return;
  const GroupNumbers numbers = group_numbers(grid, at / groups, at % groups);
  scales_.zeros[at] = static_cast<std::uint8_t>(numbers.zero);
}

void PackedCopy::take(const PackedView& grid) {
  const FormatInfo& info = layout_.info();
  const std::size_t cols = shape_[2], count = packed_bytes(info, cols);
  // Of int8 one way of storing has 128 added.
  const auto flip =
      static_cast<std::uint8_t>(grid.scales.zero_points == info.zero_points ? 0 : 0x80);
  for (std::size_t row = 0; row < shape_[1]; ++row) {
    const std::uint8_t* from = grid.values + (row + grid.origin_row()) * grid.row_bytes;
    std::uint8_t* to = values_.data() + row * row_bytes(info, cols);
    for (std::size_t i = 0; i < count; ++i) to[i] = from[i] ^ flip;
  }
  for (std::size_t at = 0; at < layout_.blocks(); ++at) take_scale(grid, at);
}

void PackedCopy::set_codes(std::size_t at, std::span<const std::uint8_t> codes) {
  const FormatInfo& info = layout_.info();
  std::uint8_t* values = values_.data() + layout_.value_bytes(at);
  if (info.shape != BlockShape::kGroup) {
    return pack_codes(info.kernels, codes.data(), codes.size(), values);
  }
  // Rows of words; integers come signed.
  const std::size_t cols = shape_[2];
  const auto half = static_cast<std::uint8_t>(
      info.zero_points == ZeroPoints::kPacked ? 1u << (info.bits - 1) : 0u);
  for (std::size_t i = 0; i < codes.size(); ++i) {
    const std::size_t col = i % cols;
    std::uint8_t* row = values + i / cols * row_bytes(info, cols);
    const auto code = static_cast<std::uint8_t>(codes[i] + half);
    if (info.bits == 8) {
      row[col] = code;
    } else {
      const unsigned place = col % 2 * 4;
      std::uint8_t& byte = row[col / 2];
      byte = static_cast<std::uint8_t>((byte & ~(15u << place)) | (code & 15u) << place);
    }
  }
}

void PackedCopy::finish(ParallelFor parallel_for) {
  const auto bytes = [](const auto* data, std::size_t count) {
    return ByteSpan{reinterpret_cast<const std::uint8_t*>(data), count * sizeof *data};
  };
  std::vector<ByteSpan> scales = {
      bytes(scales_.at(layout_, 0), layout_.blocks() * layout_.scale_bytes())};
  float offset = 0.0f;
  if (conversion_.double_quant) {
    codes_.resize(layout_.blocks());
    groups_.resize(ceil_div(codes_.size(), kScaleGroup));
    double_quantize(scales_.words.data(), codes_.size(), codes_.data(), groups_.data(), &offset,
                    parallel_for);
    scales = {bytes(codes_.data(), codes_.size()), bytes(groups_.data(), groups_.size()),
              bytes(kDynamicMap, 256), bytes(&offset, 1)};
  } else if (wants_largest()) {
    const bool divides = layout_.info().tensor_scale == TensorScale::kDivides;
    tensors_.clear();
    for (const TensorScales& one : scales_.tensors) {
      tensors_.push_back(divides ? one.encode : one.decode);
    }
    scales.push_back(bytes(tensors_.data(), tensors_.size()));
  } else if (layout_.has_zero_points()) {
    const std::size_t groups = shape_[2] / conversion_.block;
    zero_points_.resize(zero_point_bytes(layout_.info(), shape_[1], groups));
    store_zero_points(layout_.info(), shape_[1], groups, scales_.zeros.data(), zero_points_.data());
    scales.push_back(bytes(zero_points_.data(), zero_points_.size()));
  }
  view_ = bind_packed(layout_.info(), conversion_.block, shape_,
                      bytes(values_.data(), values_.size()), scales);
}

void PackedCopy::read(std::size_t row, std::size_t begin, std::size_t end, DType dtype,
                      float* out) const {
  DequantizeFn* decode = pick(dequantize_variants(), view_.format);
  if (dtype == DType::kFloat32) {
    decode(view_, row, begin, end, dtype, Stores::kCached, out);
    return;
  }
  with_type(dtype, [&]<class T>() {
    std::vector<T> narrow(end - begin);
    decode(view_, row, begin, end, dtype, Stores::kCached, narrow.data());
    for (std::size_t j = 0; j < narrow.size(); ++j) out[j] = to_float(narrow[j]);
  });
}

}  // namespace monograph
