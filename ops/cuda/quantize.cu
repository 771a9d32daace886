// Launches of quantize.
#include <algorithm>

#include "cuda/launching.cuh"
#include "monograph/formats/dynamic_map.h"
#include "monograph/kernels/quantize/gpu_scales.cuh"

namespace monograph::gpu {

void launch_quantize(const QuantizeJob& job, std::uint64_t* first_bad, Stream stream) {
  const char* const name = "quantize";
  const unsigned blocks = grid_size(name, quantize_grid(job));
  if (blocks == 0) return;
  by_format(name, job.format, [&]<class F>() {
    with_type(job.dtype, [&]<class T>() {
      if constexpr (F::kShape == BlockShape::kFlat)
        quantize_absmax_kernel<F, T>
            <<<blocks, kQuantizeThreads, 0, native(stream)>>>(job, first_bad);
      else if constexpr (F::kShape == BlockShape::kRow)
        quantize_rows_kernel<F, T><<<blocks, kQuantizeThreads, 0, native(stream)>>>(job, first_bad);
      else
        quantize_squares_kernel<F, T>
            <<<blocks, kQuantizeSquareThreads, 0, native(stream)>>>(job, first_bad);
    });
  });
  check_launch(name);
}

void launch_tensor_scales(ScaleRule rule, DType dtype, const void* input, std::size_t count,
                          std::size_t matrices, std::uint32_t* largest, TensorScales* scales,
                          Stream stream) {
  const char* const name = "quantize";
  constexpr std::size_t kMostMatrices = 65535;  // of a grid's second dimension
  constexpr std::size_t kElements = 64 * kQuantizeThreads;
  if (matrices == 0) return;
  const unsigned across =
      static_cast<unsigned>(std::clamp<std::size_t>(ceil_div(count, kElements), 1, 1024));
  with_type(dtype, [&]<class T>() {
    for (std::size_t first = 0; first < matrices; first += kMostMatrices) {
      const dim3 grid(across, static_cast<unsigned>(std::min(matrices - first, kMostMatrices)));
      largest_magnitude_kernel<T><<<grid, kQuantizeThreads, 0, native(stream)>>>(
          static_cast<const T*>(input) + first * count, count, across, largest + first);
    }
  });
  check_launch(name);
  const unsigned blocks = grid_size(name, ceil_div(matrices, kQuantizeThreads));
  nvfp4_tensor_scales_kernel<>
      <<<blocks, kQuantizeThreads, 0, native(stream)>>>(rule, largest, matrices, scales);
  check_launch(name);
}

void launch_double_quantize(const float* scales, std::size_t count, std::uint8_t* codes,
                            float* groups, float* offset, Stream stream) {
  const char* const name = "quantize";
  mean_scale_kernel<><<<1, kGroupThreads, 0, native(stream)>>>(scales, count, offset);
  check_launch(name);
  if (count == 0) return;
  DynamicBounds bounds;
  std::copy(dynamic_bounds().begin(), dynamic_bounds().end(), bounds.values);
  const unsigned blocks = grid_size(name, ceil_div(count, kGroupThreads));
  quantize_scales_kernel<>
      <<<blocks, kGroupThreads, 0, native(stream)>>>(scales, count, offset, bounds, codes, groups);
  check_launch(name);
}

}  // namespace monograph::gpu
