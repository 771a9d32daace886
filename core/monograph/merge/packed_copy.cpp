#include "monograph/merge/packed_copy.h"

#include <array>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"
#include "monograph/formats/bind.h"
#include "monograph/formats/dynamic_map.h"
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

void PackedCopy::set_codes(std::size_t at, std::span<const std::uint8_t> codes) {
  pack_codes(layout_.info().kernels, codes.data(), codes.size(),
             values_.data() + layout_.value_bytes(at));
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
