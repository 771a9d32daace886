// The gated delta rule over documents packed in one row, forward and backward. Each value head of a
// document has a state S [key_size, value_size], which starts as `state` or 0; for each token
//   S  <- e^g S
//   S  <- S + k (beta (v - k' S))'
//   out = scale q' S
// where value head h reads key head h / (value_heads / key_heads). With l2norm q and k are divided
// by sqrt(sum x^2 + 1e-6) in fp32 first.
//
// Documents of more than kFewTokens tokens are computed in chunks of kChunk from their start on,
// one triangular solve a chunk: with G the sum of g in the chunk and dec[i][j] = e^(G[i] - G[j]),
//   V^  = (I + tril(beta (k k') dec, -1))^-1 beta (v - e^G k S)
//   out = scale (e^G q S + tril((q k') dec) V^)
//   S  <- e^G[last] S + (e^(G[last] - G) k)' V^
// Exponentials are of differences only: nothing overflows where g <= 0. The backward needs the
// inputs alone: it scans the states again.
//
// The same bits for any number of threads, any neighbours and any place in the row: chunks begin
// at the start of a document and nothing is read across its border.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "monograph/base/dtype.h"
#include "monograph/cpu/parallel.h"
#include "monograph/cpu/variant.h"
#include "monograph/documents/heads_view.h"
#include "monograph/kernels/keys.h"

namespace monograph {

// A number per token and value head at data[t * token_stride + h * head_stride], in fp32 or in the
// problem's dtype.
struct GateView {
  const void* data;
  DType dtype;
  std::ptrdiff_t token_stride, head_stride;
};
struct MutableGateView {
  void* data;
  DType dtype;
  std::ptrdiff_t token_stride, head_stride;
};

// Document d has the tokens [offsets[d], offsets[d + 1]). Offsets ascend; equal ones are an empty
// document, which keeps its state. Tokens outside every document give 0 and take no gradient.
struct DeltaRuleProblem {
  DType dtype;  // of q, k, v, out and their gradients
  std::size_t tokens;
  std::size_t key_heads, value_heads;  // value_heads is a multiple of key_heads
  std::size_t key_size, value_size;    // 1 to kLargestDeltaHead
  float scale;
  bool l2norm;
  std::size_t documents;
  const std::int32_t* offsets;  // documents + 1
  const float* state;           // [documents, value_heads, key_size, value_size], or nullptr for 0
};
inline constexpr std::size_t kLargestDeltaHead = 256;

struct DeltaRuleForward {
  DeltaRuleProblem problem;
  HeadsView q, k, v;
  GateView g, beta;
  MutableHeadsView out;  // [tokens, value_heads, value_size], every row written
  float* final_state;    // as state, or nullptr
};

struct DeltaRuleBackward {
  DeltaRuleProblem problem;
  HeadsView q, k, v, dout;
  GateView g, beta;
  const float* dfinal;          // gradient of final_state, or nullptr for 0
  MutableHeadsView dq, dk, dv;  // every row written
  MutableGateView dg, dbeta;    // every number written
  float* dstate;                // as state, or nullptr
};

// Throw Error for sizes and offsets that contradict each other.
void gated_delta_rule(const DeltaRuleForward& job, ParallelFor parallel_for);
void gated_delta_rule_backward(const DeltaRuleBackward& job, ParallelFor parallel_for);

// Every variant, best instruction set first.
using DeltaRuleVariant = Variant<const struct DeltaRuleKernels, ByDType>;
const std::vector<DeltaRuleVariant>& gated_delta_rule_variants();

void gated_delta_rule_with(const DeltaRuleVariant& variant, const DeltaRuleForward& job,
                           ParallelFor parallel_for);
void gated_delta_rule_backward_with(const DeltaRuleVariant& variant, const DeltaRuleBackward& job,
                                    ParallelFor parallel_for);

// Working memory of a thread in the backward over a document of `tokens`, in bytes.
std::size_t gated_delta_rule_backward_scratch(const DeltaRuleVariant& variant,
                                              const DeltaRuleProblem& problem, std::size_t tokens);

}  // namespace monograph
