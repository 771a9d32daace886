// Every instruction set on the same random weight: any difference is a crash.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/formats/bind.h"
#include "monograph/formats/dynamic_map.h"
#include "monograph/kernels/dequantize/dequantize.h"

namespace monograph {
namespace {

// Takes bytes off the front of the input; zeros once it is used up.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
  std::vector<std::uint8_t> take(std::size_t count) {
    std::vector<std::uint8_t> taken(count);
    const std::size_t n = count < size_ ? count : size_;
    if (n != 0) std::memcpy(taken.data(), data_, n);
    data_ += n;
    size_ -= n;
    return taken;
  }
  std::size_t left() const { return size_; }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
};

// The same bits, but for a NaN: 0 * infinity has the sign of the processor's choice.
bool same(DType dtype, const std::vector<std::uint8_t>& a, const std::vector<std::uint8_t>& b) {
  if (a == b) return true;
  return with_type(dtype, [&]<class T>() {
    for (std::size_t i = 0; i < a.size(); i += sizeof(T)) {
      T x, y;
      std::memcpy(&x, &a[i], sizeof(T));
      std::memcpy(&y, &b[i], sizeof(T));
      const bool nan = std::isnan(to_float(x)) && std::isnan(to_float(y));
      if (!nan && std::memcmp(&x, &y, sizeof(T)) != 0) return false;
    }
    return true;
  });
}

}  // namespace
}  // namespace monograph

// Bytes: format, block, dtype, which scales, begin, rows; then scales and values.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace monograph;
  if (size < 16) return 0;
  const FormatInfo& info = formats()[data[0] % formats().size()];
  std::size_t block = info.smallest_block << data[1] % 8;
  if (block > info.largest_block) block = info.largest_block;
  const DType dtype = static_cast<DType>(data[2] % 3);
  const bool nested = info.double_quant && data[3] % 2 != 0;
  const bool beside = info.shape == BlockShape::kInterleaved;
  const ScaleKind kind = beside ? ScaleKind::kFp16 : info.kinds[data[3] / 2 % info.kinds.size()];
  Input input(data + 8, size - 8);
  const std::size_t rows = 1 + data[5] % 3;
  std::size_t cols = input.left() * 8 / static_cast<std::size_t>(info.bits) / rows + 1;
  const bool groups = info.shape == BlockShape::kGroup;
  if (groups) block = 1 + data[1] % 130;
  if (groups || beside || info.shape == BlockShape::kRow) cols = ceil_div(cols, block) * block;
  const std::size_t blocks = block_count(info.shape, block, 1, rows, cols);
  std::vector<std::vector<std::uint8_t>> parts;
  if (!beside) parts.push_back(input.take(nested ? blocks : blocks * size_bytes(kind)));
  if (nested) {
    parts.push_back(input.take(4 * ceil_div(blocks, kScaleGroup)));
    parts.emplace_back(1024);
    std::memcpy(parts.back().data(), kDynamicMap, 1024);
    parts.push_back(input.take(4));
  }
  if (info.tensor_scale != TensorScale::kNone) parts.push_back(input.take(4));
  if (info.zero_points != ZeroPoints::kNone && data[3] % 2 != 0)
    parts.push_back(input.take(zero_point_bytes(info, rows, cols / block)));
  const auto values = input.take(packed_bytes(info, rows, cols));
  std::vector<ByteSpan> scales;
  for (const auto& part : parts) scales.push_back({part.data(), part.size()});
  const std::size_t shape[2] = {rows, cols};
  const PackedView weight = bind_packed(info, block, shape, {values.data(), values.size()}, scales);
  const std::size_t begin = data[4] % (cols + 1);
  for (std::size_t row = 0; row < rows; ++row) {
    std::vector<std::uint8_t> first, other((cols - begin) * size_bytes(dtype));
    for (const auto& variant : dequantize_variants()) {
      if (variant.format != weight.format || variant.isa > detected_isa()) continue;
      variant.run(weight, row, begin, cols, dtype, Stores::kCached, other.data());
      if (first.empty()) first = other;
      if (!same(dtype, first, other)) std::abort();
    }
  }
  return 0;
}
