// Root mean square norm of rows, times the activation of a gate:
//   k    = 1 / sqrt(mean of x^2 + eps)
//   n[i] = x[i] * k                 rounded to the type of x where kBeforeGain
//   m[i] = n[i] * gain[i]           rounded to the type of x where kBeforeGain and `round_product`
//   y[i] = m[i] * act(z[i])         act: silu or sigmoid, in fp32; one rounding
// and its gradients, where d[i] = dy[i] * act(z[i]) and g[i] = d[i] * gain[i]:
//   dz[i]    = dy[i] * m[i] * act'(z[i])
//   dx[i]    = g[i] * k - x[i] * k^3 * mean of (g * x)
//   dgain[i] = sum over rows of d[i] * n[i]
//
// Everything between roundings is fp32; what is fused is fused everywhere; a row's sums have the
// order of RowWalk; dgain is summed over fixed pieces of rows, these in order. The same bits on
// every instruction set, for any number of threads and for a row among any others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "monograph/base/dtype.h"
#include "monograph/cpu/parallel.h"
#include "monograph/cpu/variant.h"
#include "monograph/kernels/rms_norm/rms_norm.h"

namespace monograph {

enum class Gate : std::uint8_t { kSilu, kSigmoid };

struct GatedNormProblem {
  DType dtype;  // of all tensors
  Gate gate;
  NormRounding rounding;
  bool round_product;  // the gain has the type of x
  std::size_t rows, cols;
  const void *x, *z;
  std::size_t x_stride, z_stride;  // elements between rows
  const float* gain;               // [cols]
  float eps;
};

// Results are contiguous and overlap no input.
struct GatedNormForward {
  GatedNormProblem problem;
  void* y;
};

struct GatedNormBackward {
  GatedNormProblem problem;
  const void* dy;
  std::size_t dy_stride;
  void *dx, *dz;
  float* dgain;  // [cols] or nullptr
};

// Rows [begin, end). `dgain`, [cols], is added to. `scratch` holds 2 * cols numbers.
struct GatedNormKernels {
  void (*forward)(const GatedNormForward& job, std::size_t begin, std::size_t end);
  void (*backward)(const GatedNormBackward& job, std::size_t begin, std::size_t end, float* dgain,
                   float* scratch);
};

struct ByGate {
  DType dtype;
  Gate gate;
  bool operator==(const ByGate&) const = default;
};

// Every variant, best instruction set first.
const std::vector<Variant<const GatedNormKernels, ByGate>>& rms_norm_gated_variants();

void rms_norm_gated(const GatedNormForward& job, ParallelFor parallel_for);
void rms_norm_gated_backward(const GatedNormBackward& job, ParallelFor parallel_for);

}  // namespace monograph
