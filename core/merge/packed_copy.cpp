#include "merge/packed_copy.h"

#include "base/error.h"
#include "base/float_types.h"
#include "formats/dynamic_map.h"
#include "kernels/dequantize/dequantize.h"
#include "safetensors/utf8.h"

namespace monograph {

PackedCopy::PackedCopy(const Conversion& conversion, std::size_t rows, std::size_t cols)
    : conversion_(conversion),
      values_(packed_bytes(*find_format(conversion.format), rows * cols)),
      scales_(ceil_div(rows * cols, conversion.block)) {
  view_.format = conversion.format;
  view_.rows = rows;
  view_.cols = cols;
  view_.block = conversion.block;
}

void PackedCopy::quantize(std::size_t at, DType dtype, const void* input, std::size_t count) {
  const QuantizeJob job = {
      conversion_.format,
      dtype,
      input,
      count,
      conversion_.block,
      NonFinite::kError,
      values_.data() + at / 2,
      reinterpret_cast<std::uint8_t*>(scales_.data() + at / conversion_.block)};
  QuantizeFn* run = pick(quantize_variants(), conversion_.format);
  const std::size_t bad = run(job, 0, ceil_div(count, conversion_.block));
  if (bad == kAllFinite) return;
  throw Error("weight " + safetensors::in_quotes(conversion_.weight->name) + ": element " +
              std::to_string(at + bad) + " is no finite number and cannot be quantised");
}

void PackedCopy::finish(ParallelFor parallel_for) {
  view_.values = values_.data();
  view_.scales.blocks = reinterpret_cast<const std::uint8_t*>(scales_.data());
  if (!conversion_.double_quant) return;
  codes_.resize(scales_.size());
  groups_.resize(ceil_div(scales_.size(), kScaleGroup));
  double_quantize(scales_.data(), scales_.size(), codes_.data(), groups_.data(),
                  &view_.scales.offset, parallel_for);
  view_.scales.blocks = codes_.data();
  view_.scales.groups = reinterpret_cast<const std::uint8_t*>(groups_.data());
  view_.scales.map = reinterpret_cast<const std::uint8_t*>(kDynamicMap);
}

void PackedCopy::read_row(std::size_t row, DType dtype, float* out) const {
  DequantizeFn* decode = pick(dequantize_variants(), conversion_.format);
  if (dtype == DType::kFloat32) {
    decode(view_, row, 0, view_.cols, dtype, Stores::kCached, out);
    return;
  }
  with_type(dtype, [&]<class T>() {
    std::vector<T> narrow(view_.cols);
    decode(view_, row, 0, view_.cols, dtype, Stores::kCached, narrow.data());
    for (std::size_t j = 0; j < view_.cols; ++j) out[j] = to_float(narrow[j]);
  });
}

}  // namespace monograph
