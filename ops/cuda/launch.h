// What starts the kernels of core/monograph/kernels/*/gpu*.cuh, one .cu file a kernel. No torch
// here, and no header of CUDA: a stream is a pointer, memory is the device's. Nothing waits,
// nothing allocates. Throws Error with the words of CUDA's run time where a launch fails.
#pragma once

#include <cstddef>
#include <cstdint>

#include "monograph/base/dtype.h"
#include "monograph/formats/packed_view.h"
#include "monograph/gpu/crossover.h"
#include "monograph/kernels/linear_cross_entropy/kernels.h"
#include "monograph/kernels/quantize/quantize.h"

namespace monograph::gpu {

using Stream = void*;

// The whole view, or a slice of its rows, to out[rows * cols].
void launch_dequantize(const PackedView& weight, DType dtype, void* out, Stream stream);
// Columns [first, first + count) to out[rows, count].
void launch_dequantize_columns(const PackedView& weight, std::size_t first, std::size_t count,
                               DType dtype, void* out, Stream stream);

// y[M, N] = gain * (x[M, K] W^T + u[M, rank] b^T) + bias straight from the packed weight: few rows.
// Matrices have rows `stride` elements apart; b [N, rank] is contiguous. Elements are of `dtype`.
struct FewRows {
  const PackedView& weight;
  DType dtype;
  std::size_t rows;  // at most most_fused_rows(dtype)
  const void* x;
  std::size_t x_stride;
  std::size_t rank = 0;  // 0 for no low-rank part
  const void* u = nullptr;
  std::size_t u_stride = 0;
  const void* b = nullptr;
  const void* bias = nullptr;   // [N]
  const float* gain = nullptr;  // [N]
  void* y;
  std::size_t y_stride;
};
void launch_linear(const FewRows& job, Stream stream);

// Rows of logits of `dtype`, `stride` elements apart: loss and log-sum-exp of each, statistics
// unless they are nullptr; with `gradient` the logits become those of the loss. A label of -100
// gives 0, one outside of the vocabulary NaN.
struct LossPanel {
  void* logits;
  DType dtype;
  std::size_t rows, stride, count;
  LogitsMap map;
  const std::int64_t* labels;
  float *loss, *lse;
  float *entropy, *log_sum_squares, *mean;
  bool* top;
  bool gradient;
};
void launch_loss_rows(const LossPanel& panel, Stream stream);

// `first_bad` holds ~0 and becomes the index of the first non-finite element, where the job forbids
// them. The job's pointers are the device's.
void launch_quantize(const QuantizeJob& job, std::uint64_t* first_bad, Stream stream);
// The scale of each of `matrices` matrices of `count` elements; `largest` holds 0 for each.
void launch_tensor_scales(ScaleRule rule, DType dtype, const void* input, std::size_t count,
                          std::size_t matrices, std::uint32_t* largest, TensorScales* scales,
                          Stream stream);
// As double_quantize() of formats/dynamic_map.h.
void launch_double_quantize(const float* scales, std::size_t count, std::uint8_t* codes,
                            float* groups, float* offset, Stream stream);

// x with elements zeroed with `probability`, the others divided by 1 - probability. The seed is
// read on the device.
void launch_seeded_dropout(DType dtype, const void* x, std::size_t count, const std::int64_t* seed,
                           std::uint64_t stream_number, double probability, void* out,
                           Stream stream);

}  // namespace monograph::gpu
