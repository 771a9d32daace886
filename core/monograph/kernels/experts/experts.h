// A layer of experts and its gradients, straight from packed weights. Token t has k slots, slot s
// of it goes to expert e = ids[t, s] with weight w = weights[t, s]:
//   pre = W1_e x_t + scale1 B1_e A1_e x_t + bias1_e
//   h   = activation(pre)
//   d   = W2_e h + scale2 B2_e A2_e h + bias2_e
//   y_t = sum over slots of w d
// Slots whose id is outside [0, experts) are skipped: no product, nothing read, nothing added.
//
// Slots are sorted by expert, stable, and those of an expert are one product of `linear_products`
// on its slice of the weight. What is rounded to the type of x: pre, h, d, u = scale A x, and
// backward dh, du, dpre and the slots' parts of dx, once each. Sums over slots are fp32 in the
// order of slots, those over tokens (gradients of factors and biases) fp32 in the order of tokens.
//
// Slots may be a list instead (`slot_rows`): each names its row of x, and its d or its part of dx
// is a row of the result, neither weighted nor summed. A sum over slots of these rows, in the order
// of slots and rounded once, gives the bits of one call.
//
// For each instruction set a token's row depends on no other token, and nothing on the number of
// threads. A packed weight gives the bits of its dequantised values in the type of x.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "monograph/cpu/parallel.h"
#include "monograph/formats/slice.h"
#include "monograph/kernels/linear/operands.h"

namespace monograph {

enum class ExpertsActivation : std::uint8_t {
  kSiluMul,         // silu(gate) up
  kClampedSiluMul,  // silu(min(gate, limit)) clamp(up, -limit, limit)
  kClampedGlu,      // gate and up clamped alike: (up + 1) gate sigmoid(alpha gate)
  kGeluTanhMul,     // gelu_tanh(gate) up
  kReluSquare,      // max(0, pre)^2, no gate
  kSilu,            // silu(pre), no gate
};
inline constexpr std::size_t kExpertsActivations = 6;

constexpr bool is_gated(ExpertsActivation activation) {
  return activation < ExpertsActivation::kReluSquare;
}

// The weights of all experts for one projection, out[out] = W_e[out, in] * in[in].
struct ExpertsProjection {
  // [E, out, in]. With `transposed` in the problem [E, in, out], plain. A grid has whole experts,
  // or an expert has whole grids.
  PackedGrids weight;
  // Gate and up as two stacks, as a GGUF file has them: `weight` then is gate, [E, out / 2, in],
  // and this up, packed alike or otherwise. The bits are those of one stack with the rows of both.
  // With `interleaved` in the problem `weight` is alternating() of both instead, and this none.
  std::optional<PackedGrids> up_half;
  DType dtype = DType::kFloat32;  // of a plain weight
  std::size_t in = 0, out = 0;
  const void* bias = nullptr;  // [E, out] or none; rounded to the type of x
  DType bias_dtype = DType::kFloat32;
  // The LoRA of PEFT's target_parameters, or none: A [E rank, in], row e * rank + j is rank j of
  // expert e; B [out, rank E], column j * E + e. Rounded to the type of x.
  const void *a = nullptr, *b = nullptr;
  DType a_dtype = DType::kFloat32, b_dtype = DType::kFloat32;
  std::size_t rank = 0;
  float scale = 1;
};

struct ExpertsProblem {
  DType dtype = DType::kFloat32;                   // of x, pre and y
  std::size_t experts = 0, tokens = 0, slots = 0;  // slots of a token; fewer than 2^32 in all
  Matrix x;                                        // [tokens, in]
  const std::int64_t* ids = nullptr;               // [tokens, slots], as the weights
  const void* weights = nullptr;                   // forward of a list of slots reads none
  DType weights_dtype = DType::kFloat32;
  // [tokens], rows of x and dy: a list of `tokens` slots, whose `slots` is 1. y and dx then have a
  // row for each of them, d and not w d. nullptr: slot s is of token s / slots.
  const std::int64_t* slot_rows = nullptr;
  ExpertsProjection up, down;  // gate and up together; back to the size of x
  bool transposed = false;
  ExpertsActivation activation = ExpertsActivation::kSiluMul;
  bool interleaved = false;  // entry 2i of `pre` is gate, 2i + 1 up; else the first half is gate
  float alpha = 1, limit = 0;

  std::size_t all_slots() const { return tokens * slots; }
};

// y [tokens, down.out]. pre [all slots, up.out], sorted by expert, zeros for the skipped ones
// behind; nullptr if nobody wants it. Beyond both it takes at most twice pre, 64 MiB, and the
// factors in the type of x.
void experts(const ExpertsProblem& problem, void* y, void* pre, ParallelFor parallel_for);

// out[t] = sum over the slots of t of weight * row, fp32 in the order of slots from +0, rounded
// once; without weights of the rows themselves. places [tokens, slots]: the row of each slot; a
// place outside [0, rows.rows) adds nothing. out [tokens, rows.cols] in the type of rows.
struct SlotSums {
  DType dtype = DType::kFloat32;  // of rows and out
  Matrix rows;
  std::size_t tokens = 0, slots = 0;
  const std::int64_t* places = nullptr;
  const void* weights = nullptr;
  DType weights_dtype = DType::kFloat32;
};
void combine_slots(const SlotSums& sums, void* out, ParallelFor parallel_for);

// What is wanted of the gradients; nullptr for the others. Contiguous, in the shapes and types of
// what they are gradients of.
struct ExpertsGradients {
  void* dx = nullptr;
  void* dweights = nullptr;
  void *dbias1 = nullptr, *dbias2 = nullptr;
  void *da1 = nullptr, *db1 = nullptr, *da2 = nullptr, *db2 = nullptr;
};

// dy [rows of x, down.out] in the type of x. Without `pre` it is computed again. Beyond the
// gradients it takes what forward takes.
void experts_backward(const ExpertsProblem& problem, const Matrix& dy, const void* pre,
                      const ExpertsGradients& gradients, ParallelFor parallel_for);

// The gradients of plain weights, in their shapes and types: d_values1 and d_values2. A weight
// whose type is not that of x gets sums that were rounded to the type of x.
void experts_dw(const ExpertsProblem& problem, const Matrix& dy, const void* pre, void* d_values1,
                void* d_values2, ParallelFor parallel_for);

}  // namespace monograph
