#include "monograph/gguf_merge/block_grid.h"

#include <algorithm>
#include <cmath>

#include "monograph/base/error.h"
#include "monograph/gguf/blocks.h"
#include "monograph/gguf/decode_blocks.h"
#include "monograph/gguf/superblock_scales.h"

namespace monograph::gguf {
namespace {

constexpr std::uint8_t kZeroOfIq4 = 8;  // the level 1, which is the nearest to 0
constexpr std::uint8_t kMinusZero = 8;  // of E2M1, a second zero in ggml; never made

class Reader {
 public:
  Reader(BlockGrid& grid, std::size_t elements) : grid_(grid) {
    grid.scale.reserve(elements);
    grid.minimum.reserve(elements);
  }
  void add(std::size_t elements, float scale, float minimum = 0) {
    grid_.scale.insert(grid_.scale.end(), elements, scale);
    grid_.minimum.insert(grid_.minimum.end(), elements, minimum);
  }

 private:
  BlockGrid& grid_;
};

void with_minimum(const std::uint8_t* block, Reader& out) {
  const float d = float_at<Fp16>(block), dmin = float_at<Fp16>(block + 2);
  for (std::size_t part = 0; part < 8; ++part) {
    const ScaleAndMinimum six = six_bits(block + 4, part);
    out.add(32, d * six.scale, dmin * six.minimum);
  }
}

void q6_k(const std::uint8_t* block, Reader& out) {
  const float d = float_at<Fp16>(block + 208);
  for (std::size_t part = 0; part < 16; ++part) {
    out.add(16, d * static_cast<float>(static_cast<std::int8_t>(block[192 + part])));
  }
}

void iq4_xs(const std::uint8_t* block, Reader& out) {
  const float d = float_at<Fp16>(block);
  for (std::size_t part = 0; part < 8; ++part) out.add(32, d * scale_of_iq4_xs(block, part));
}

void read_scales(TensorType type, const std::uint8_t* block, Reader& out) {
  switch (type) {
    case TensorType::kQ4Min:
    case TensorType::kQ5Min:
      return out.add(kBlock, float_at<Fp16>(block), -float_at<Fp16>(block + 2));
    case TensorType::kQ4K:
    case TensorType::kQ5K:
      return with_minimum(block, out);
    case TensorType::kQ6K:
      return q6_k(block, out);
    case TensorType::kIQ4Xs:
      return iq4_xs(block, out);
    case TensorType::kMxfp4:
      return out.add(kBlock, half_of_e8m0(block[0]));
    default:
      return out.add(kBlock, float_at<Fp16>(block));
  }
}

void set_levels(TensorType type, BlockGrid& grid) {
  grid.codes = 16;
  switch (type) {
    case TensorType::kQ4:
      grid.lowest = -8;
      return;
    case TensorType::kQ5:
      grid.lowest = -16;
      grid.codes = 32;
      return;
    case TensorType::kQ5Min:
    case TensorType::kQ5K:
      grid.codes = 32;
      return;
    case TensorType::kQ6K:
      grid.lowest = -32;
      grid.codes = 64;
      return;
    case TensorType::kQ8:
      grid.lowest = -127;  // as ggml's encoder: -128 is read, not written
      grid.codes = 255;
      return;
    case TensorType::kIQ4:
    case TensorType::kIQ4Xs:
      grid.levels = kIq4Values;
      return;
    case TensorType::kMxfp4:
      grid.levels = kMxfp4Values;
      return;
    case TensorType::kQ4Min:
    case TensorType::kQ4K:
      return;
    default:
      MONOGRAPH_ASSERT(false);  // plain floats have no codes
  }
}

}  // namespace

float BlockGrid::value(std::size_t i, std::uint8_t code) const {
  const float level = levels != nullptr ? levels[code] : static_cast<float>(lowest + code);
  return scale[i] * level - minimum[i];
}

std::uint8_t BlockGrid::nearest(std::size_t i, double x) const {
  const double step = scale[i];
  if (step == 0) {
    return levels == kIq4Values ? kZeroOfIq4
                                : static_cast<std::uint8_t>(levels != nullptr ? 0 : -lowest);
  }
  const double number = (x + static_cast<double>(minimum[i])) / step;
  if (levels == nullptr) {
    const double low = lowest, high = lowest + static_cast<int>(codes) - 1;
    // The ceiling, without a call of the library for it.
    const double half = std::clamp(number, low, high) - 0.5;
    const int below = static_cast<int>(half);
    return static_cast<std::uint8_t>(below + (half > static_cast<double>(below)) - lowest);
  }
  std::uint8_t found = 0;
  for (std::uint8_t code = 1; code < codes; ++code) {
    if (levels == kMxfp4Values && code == kMinusZero) continue;
    if (std::fabs(number - static_cast<double>(levels[code])) <
        std::fabs(number - static_cast<double>(levels[found]))) {
      found = code;
    }
  }
  return found;
}

bool BlockGrid::reaches(std::size_t i, double x) const {
  const double step = scale[i];
  if (step == 0) return x + static_cast<double>(minimum[i]) == 0;
  const double number = (x + static_cast<double>(minimum[i])) / step;
  if (levels == kMxfp4Values) return std::fabs(number) <= 14;  // the last step is 4 wide
  if (levels == kIq4Values) return number >= -138.5 && number <= 125;
  return number >= lowest - 0.5 && number <= lowest + static_cast<int>(codes) - 0.5;
}

BlockGrid block_grid(TensorType type, const std::uint8_t* blocks, std::size_t count) {
  const TensorTypeInfo& info = info_of(type);
  BlockGrid grid;
  set_levels(type, grid);
  Reader reader(grid, count * info.block_elements);
  for (std::size_t i = 0; i < count; ++i) read_scales(type, blocks + i * info.block_bytes, reader);
  return grid;
}

}  // namespace monograph::gguf
