// The bodies of the kernels compiled for AMD, without ROCm: tools/check_hip.py looks at the code.
// No operator launches them. Not here: linear with mma, which AMD does not have, and that of 8 rows,
// which has two scalar registers too many on gfx90a.
#include "monograph/kernels/dequantize/gpu_columns.cuh"
#include "monograph/kernels/linear/gpu.cuh"
#include "monograph/kernels/linear_cross_entropy/gpu.cuh"
#include "monograph/kernels/quantize/gpu_scales.cuh"
#include "monograph/kernels/seeded_dropout/gpu.cuh"

namespace monograph::gpu {

template <class F, class T>
void instantiate_format() {
  if constexpr (F::kShape == BlockShape::kFlat)
    (void)&quantize_absmax_kernel<F, T>;
  else if constexpr (F::kShape == BlockShape::kRow)
    (void)&quantize_rows_kernel<F, T>;
  else
    (void)&quantize_squares_kernel<F, T>;
  if constexpr (F::kShape != BlockShape::kSquare) (void)&dequantize_kernel<F, T>;
  (void)&dequantize_columns_kernel<F, T>;
  (void)&linear_simt_kernel<F, T, 1>;
  (void)&linear_simt_kernel<F, T, 4>;
}
template <class T, class... Fs>
void instantiate(FormatList<Fs...>) {
  (instantiate_format<Fs, T>(), ...);
  (void)&largest_magnitude_kernel<T>;
  (void)&loss_rows_kernel<T>;
  (void)&seeded_dropout_kernel<T>;
}
void instantiate_all() {
  instantiate<float>(PackedFormats{});
  instantiate<Bf16>(PackedFormats{});
  instantiate<Fp16>(PackedFormats{});
  (void)&nvfp4_tensor_scales_kernel<>;
  (void)&mean_scale_kernel<>;
  (void)&quantize_scales_kernel<>;
}

}  // namespace monograph::gpu
