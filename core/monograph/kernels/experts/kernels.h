// The seam between the driver and the units of the instruction sets: rows of `pre`, sums of slots,
// sums over tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "monograph/cpu/variant.h"
#include "monograph/kernels/experts/experts.h"
#include "monograph/kernels/keys.h"

namespace monograph {

// One row: `pre` has one or two entries for each of the `inner` of h.
struct ActivationJob {
  ExpertsActivation activation;
  bool interleaved;
  float alpha, limit;
  std::size_t inner;
  const void* pre;
  void* h;  // of `activate`; `activate_back` writes it too unless it is nullptr
  // Of `activate_back` alone: dpre may be pre and h may be dh. dpre = slope * (weight * dh), one
  // rounding.
  const void* dh;
  void* dpre;
  float weight;
};

// out = sum over slots of factor * row, nothing fused; without factors the rows themselves.
struct SlotSumJob {
  const void* rows;
  std::size_t stride, cols;
  const std::uint32_t* places;  // `slots` of them; kSkippedRow adds nothing
  const float* factors;
  std::size_t slots;
  void* out;
};

// out[j, c] = sum over t of small[t, j] * large[rows[t], c] in the order of t, one chain; without
// `rows` row t is row t. c counts `cols` columns from the pointer on.
struct GramJob {
  std::size_t rank, count;
  const void* large;
  std::size_t stride;
  const std::uint32_t* rows;
  std::size_t cols;
  float* out;
  std::size_t out_stride;
};

// out[index[k] * out_stride + i] = in[i * in_stride + k], rounded, for i < rows, k < cols, each at
// most kTileSide; a k whose index is kSkippedRow is left out.
inline constexpr std::size_t kTileSide = 16;
inline constexpr std::uint32_t kInOrder[kTileSide] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                      8, 9, 10, 11, 12, 13, 14, 15};
struct TransposeJob {
  const void* in;
  std::size_t in_stride, rows, cols;
  const std::uint32_t* index;
  void* out;
  std::size_t out_stride;
};

struct ExpertsKernels {
  void (*activate)(const ActivationJob& job);
  float (*activate_back)(const ActivationJob& job);  // returns <h, dh>, h rounded
  void (*sum_slots)(const SlotSumJob& job);
  float (*dot)(const void* a, const void* b, std::size_t size);
  void (*gram)(const GramJob& job, const float* small);
  void (*transpose)(const TransposeJob& job);         // of elements
  void (*transpose_floats)(const TransposeJob& job);  // of fp32 to elements
  void (*round)(const float* in, std::size_t size, void* out);
  void (*widen)(const void* in, std::size_t size, float* out);
};

// Best instruction set first.
const std::vector<Variant<const ExpertsKernels, ByDType>>& experts_variants();
const ExpertsKernels& pick_experts(DType dtype);

}  // namespace monograph
