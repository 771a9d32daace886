// Root mean square norm of rows, with the residual stream added before it:
//   s[i] = x[i] + residual[i], rounded to the type of x; or x[i]
//   k    = 1 / sqrt(mean of s^2 + eps)
//   y[i] = round(s[i] * k) * gain[i]     kBeforeGain: s * k rounded to the type of x (Llama, Qwen)
//   y[i] = s[i] * k * gain[i]            kOnce: one rounding, at the end (Gemma, OLMo)
// and its gradient, where n[i] is what `gain` multiplies and g[i] = dy[i] * gain[i]:
//   dx[i]    = g[i] * k - s[i] * k^3 * mean of (g * s) + dsum[i]     one rounding, at the end
//   dgain[i] = sum over rows of dy[i] * n[i]
//
// Everything between roundings is fp32 without fused operations; a row's sums have the order of
// RowWalk; dgain is summed over fixed pieces of rows, these in order. The same bits on every
// instruction set, for any number of threads and for a row among any others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "monograph/base/dtype.h"
#include "monograph/cpu/parallel.h"
#include "monograph/cpu/variant.h"

namespace monograph {

enum class NormRounding : std::uint8_t { kBeforeGain, kOnce };

// Strides count elements between rows. Results are contiguous and overlap no input.
struct RmsNormForward {
  DType dtype;      // of x, residual and sum
  DType out_dtype;  // of y: `dtype` or float32
  NormRounding rounding;
  std::size_t rows, cols;
  const void* x;
  std::size_t x_stride;
  const void* residual;  // or nullptr
  std::size_t residual_stride;
  const float* gain;  // [cols]
  float eps;
  void* sum;  // nullptr without a residual
  void* y;
};

struct RmsNormBackward {
  DType dtype;      // of x, dsum and dx
  DType out_dtype;  // of dy
  NormRounding rounding;
  std::size_t rows, cols;
  const void* dy;
  std::size_t dy_stride;
  const void* dsum;  // or nullptr
  std::size_t dsum_stride;
  const void* x;  // the sum, if there was a residual
  std::size_t x_stride;
  const float* gain;
  float eps;
  void* dx;
  float* dgain;  // [cols] or nullptr
};

// Rows [begin, end). `dgain` is added to unless it is nullptr.
struct RmsNormKernels {
  void (*forward)(const RmsNormForward& job, std::size_t begin, std::size_t end);
  void (*backward)(const RmsNormBackward& job, std::size_t begin, std::size_t end, float* dgain);
};

struct ByNormTypes {
  DType dtype, out_dtype;
  bool operator==(const ByNormTypes&) const = default;
};

// Every variant, best instruction set first.
const std::vector<Variant<const RmsNormKernels, ByNormTypes>>& rms_norm_variants();

void rms_norm(const RmsNormForward& job, ParallelFor parallel_for);
void rms_norm_backward(const RmsNormBackward& job, ParallelFor parallel_for);

}  // namespace monograph
