// Rotary position embedding of heads, with an optional norm of each head before it:
//   v    = x, or rms_norm(x, gain) rounded to the type of x (kernels/rms_norm/rms_norm.h)
//   y[i] = round(v[i] * cos[t, i]) + round(r(v)[i] * sin[t, i])      i < rotated; y[i] = v[i]
//   beyond
// where r turns pairs (a, b) into (-b, a): elements i and i + rotated / 2 (halves), or 2 i and 2 i
// + 1 (interleaved). The roundings to the type of x are those of transformers'
// apply_rotary_pos_emb. The gradient is fp32 from dy to the one rounding of dx.
//
// No fused operations, sums in the order of RowWalk, dgain over fixed pieces of tokens: the same
// bits on every instruction set, for any number of threads and a token among any others.
#pragma once

#include <cstddef>
#include <vector>

#include "monograph/base/dtype.h"
#include "monograph/cpu/parallel.h"
#include "monograph/cpu/variant.h"
#include "monograph/kernels/keys.h"
#include "monograph/kernels/rms_norm/rms_norm.h"

namespace monograph {

inline constexpr std::size_t kLargestRotaryHead = 1024;

// [tokens, heads, size] with a contiguous last dimension; strides count elements.
struct HeadRows {
  const void* data;
  std::size_t token_stride, head_stride;
};

struct RotaryProblem {
  DType dtype;
  std::size_t tokens, heads, size,
      rotated;  // rotated even, at most size; size at most kLargestRotaryHead
  bool interleaved;
  const void *cos, *sin;  // [angles, rotated], contiguous, in `dtype`
  std::size_t angles;     // token t takes row t % angles
  const float* gain;      // [size], or nullptr for no norm
  float eps;
  NormRounding rounding;
};

struct RotaryForward {
  RotaryProblem problem;
  HeadRows x;
  void* y;  // contiguous
};

struct RotaryBackward {
  RotaryProblem problem;
  HeadRows dy;
  HeadRows x;    // read only with a norm
  void* dx;      // contiguous
  float* dgain;  // [size] or nullptr
};

// Tokens [begin, end). `dgain` is added to unless it is nullptr.
struct RotaryKernels {
  void (*forward)(const RotaryForward& job, std::size_t begin, std::size_t end);
  void (*backward)(const RotaryBackward& job, std::size_t begin, std::size_t end, float* dgain);
};

// Every variant, best instruction set first.
const std::vector<Variant<const RotaryKernels, ByDType>>& rotary_variants();

void rotary(const RotaryForward& job, ParallelFor parallel_for);
void rotary_backward(const RotaryBackward& job, ParallelFor parallel_for);

}  // namespace monograph
