// AdamW after clipping by the global norm. With g the gradient times `clip`, t the step's count:
//   m = m + (1 - beta1) (g - m)
//   v = beta2 v + ((1 - beta2) g) g
//   p = p - p (rate weight_decay)
//   p = p - (rate / (1 - beta1^t) m) / (sqrt(v) (1 / sqrt(1 - beta2^t)) + eps)
// in fp32, each operation rounded, nothing fused; what stands in brackets and does not depend on an
// element is one fp32 number, computed in fp64.
//
// The norm is a sum of squares in fp64: over fixed blocks of a tensor, on 16 lanes folded in
// halves, then the blocks in order. The square of an fp32 number is exact there. One fp32 chain
// over 42 million elements was 0.29 % short.
//
// The same bits on every instruction set and for any number of threads.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "monograph/base/dtype.h"
#include "monograph/cpu/parallel.h"
#include "monograph/cpu/variant.h"
#include "monograph/kernels/keys.h"

namespace monograph {

// Elements of a tensor whose squares are summed apart.
inline constexpr std::size_t kNormBlock = 16384;

// A parameter, its gradient and its moments: contiguous, and none overlaps another.
struct AdamwTensor {
  std::size_t size;
  DType gradient_dtype;
  const void* gradient;
  float* parameter;
  float* exp_avg;
  float* exp_avg_sq;
  double weight_decay;
  double step;  // this one included, from 1 on
};

struct AdamwSettings {
  double rate, beta1, beta2, eps;
  float clip;  // 1: nothing is clipped
};

// What is the same for all elements of a tensor.
struct AdamwNumbers {
  float clip, beta2, rest1, rest2, decay, step_size, inverse_root, eps;
};

struct AdamwKernels {
  double (*squares)(const void* gradient, std::size_t size);
  void (*update)(const AdamwTensor& tensor, const AdamwNumbers& numbers, std::size_t begin,
                 std::size_t end);
};

// Every variant by the type of the gradient, best instruction set first.
const std::vector<Variant<const AdamwKernels, ByDType>>& adamw_variants();

AdamwNumbers adamw_numbers(const AdamwTensor& tensor, const AdamwSettings& settings);

// The norm of all gradients together.
double gradient_norm(std::span<const AdamwTensor> tensors, ParallelFor parallel_for);

void adamw(std::span<const AdamwTensor> tensors, const AdamwSettings& settings,
           ParallelFor parallel_for);

}  // namespace monograph
