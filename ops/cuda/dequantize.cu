// Launches of dequantize.
#include <algorithm>

#include "cuda/launching.cuh"
#include "monograph/formats/slice.h"
#include "monograph/kernels/dequantize/gpu_columns.cuh"

namespace monograph::gpu {

void launch_dequantize(const PackedView& weight, DType dtype, void* out, Stream stream) {
  if (weight.elements() == 0) return;
  const char* const name = "dequantize";
  if (find_format(weight.format)->shape == BlockShape::kSquare) {
    // Where blocks know rows, elements are divided into rows: in 32 bits, so some rows at a time.
    const std::size_t step = std::max<std::size_t>(kDequantizeColumnsElements / weight.cols, 1);
    for (std::size_t row = 0; row < weight.rows; row += step)
      launch_dequantize_columns(
          slice_rows(weight, row, std::min(step, weight.rows - row)), 0, weight.cols, dtype,
          static_cast<std::byte*>(out) + row * weight.cols * size_bytes(dtype), stream);
    return;
  }
  const unsigned blocks = grid_size(name, dequantize_blocks(weight.elements()));
  by_format(name, weight.format, [&]<class F>() {
    if constexpr (F::kShape != BlockShape::kSquare)
      with_type(dtype, [&]<class T>() {
        dequantize_kernel<F, T>
            <<<blocks, kDequantizeThreads, 0, native(stream)>>>(weight, static_cast<T*>(out));
      });
  });
  check_launch(name);
}

void launch_dequantize_columns(const PackedView& weight, std::size_t first, std::size_t count,
                               DType dtype, void* out, Stream stream) {
  if (weight.rows * count == 0) return;
  const char* const name = "dequantize";
  if (weight.cols >= kDequantizeColumnsElements || weight.rows * count > kDequantizeColumnsElements)
    throw Error("dequantize: " + std::to_string(weight.rows) + " x " + std::to_string(count) +
                " elements at once, fewer than 2^32 wanted");
  const unsigned blocks = grid_size(name, dequantize_blocks(weight.rows * count));
  by_format(name, weight.format, [&]<class F>() {
    with_type(dtype, [&]<class T>() {
      dequantize_columns_kernel<F, T><<<blocks, kDequantizeThreads, 0, native(stream)>>>(
          weight, static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(count),
          static_cast<T*>(out));
    });
  });
  check_launch(name);
}

}  // namespace monograph::gpu
