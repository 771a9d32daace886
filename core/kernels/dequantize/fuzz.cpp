// Every instruction set on the same random weight: any difference is a crash.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "formats/dynamic_map.h"
#include "kernels/dequantize/dequantize.h"

// Bytes: format, block, dtype, nested, begin, the rest split between scales and values.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace monograph;
  if (size < 16) return 0;
  PackedView weight;
  const FormatInfo& info = formats()[data[0] % formats().size()];
  weight.format = info.format;
  weight.block = info.smallest_block << data[1] % 8;
  const DType dtype = static_cast<DType>(data[2] % 3);
  const bool nested = data[3] % 2 != 0;
  const std::uint8_t* const rest = data + 8;
  const std::size_t left = size - 8;
  // One scale a block in front, the values behind: as many blocks as fit.
  const std::size_t block_bytes = weight.block / 2 + (nested ? 1 : 4) + (nested ? 4 : 0);
  const std::size_t blocks = left / block_bytes;
  if (blocks == 0) return 0;
  weight.rows = 1;
  weight.cols = blocks * weight.block - data[4] % weight.block;
  weight.scales.blocks = rest;
  const std::size_t scale_bytes = blocks * (nested ? 1 : 4);
  if (nested) {
    weight.scales.groups = rest + scale_bytes;
    weight.scales.map = reinterpret_cast<const std::uint8_t*>(kDynamicMap);
    std::memcpy(&weight.scales.offset, data + 4, 4);
  }
  weight.values = rest + scale_bytes + (nested ? 4 * blocks : 0);
  const std::size_t begin = data[5] % (weight.cols + 1);
  std::vector<std::uint8_t> first, other((weight.cols - begin) * size_bytes(dtype));
  for (const auto& variant : dequantize_variants()) {
    if (variant.format != weight.format || variant.isa > detected_isa()) continue;
    variant.run(weight, 0, begin, weight.cols, dtype, Stores::kCached, other.data());
    if (first.empty()) first = other;
    if (first != other) std::abort();
  }
  return 0;
}
