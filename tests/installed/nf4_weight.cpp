// Quantises a weight to NF4 and reads it back.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "monograph/kernels/dequantize/dequantize.h"
#include "monograph/kernels/quantize/quantize.h"

int main() {
  using namespace monograph;
  constexpr std::size_t kRows = 64, kCols = 128, kBlock = 64;
  const std::vector<float> weight(kRows * kCols, 0.5f);
  std::vector<std::uint8_t> values(weight.size() / 2);           // two codes per byte
  std::vector<std::uint8_t> scales(4 * weight.size() / kBlock);  // one float per block, as bytes
  const QuantizeJob job = {.format = Format::kNf4,
                           .dtype = DType::kFloat32,
                           .input = weight.data(),
                           .elements = weight.size(),
                           .block = kBlock,
                           .nonfinite = NonFinite::kError,
                           .values = values.data(),
                           .scales = scales.data()};
  if (quantize(job, serial_for)) return 1;  // holds the index of a NaN or an infinity

  std::vector<float> out(weight.size());
  const PackedView view = {.format = Format::kNf4,
                           .rows = kRows,
                           .cols = kCols,
                           .block = kBlock,
                           .values = values.data(),
                           .scales = {.blocks = scales.data()}};
  dequantize(view, DType::kFloat32, out.data(), serial_for);
  std::printf("%g\n", out[0]);  // 0.5
}
