// Attention over documents packed in one row, forward and backward. For query i of a document with
// Lq queries and Lk keys, aligned at p = i + Lk - Lq (bottom right), and each head h of a group:
//   s[j]   = softcap(scale * q[i] . k[j])       softcap(x) = c * tanh(x / c), or x without a cap
//   out[i] = sum_j exp(s[j] - lse[i]) * v[j]    lse[i] = log(exp(sink[h]) + sum_j exp(s[j]))
// over the keys j that i may see: j <= p if causal, p - j < window (and, if not causal, j - p <
// window). A query that sees no key gives 0 with lse = sink[h] (or -inf). Scores, sums and
// gradients accumulate in fp32; with bf16 on matrix units the probabilities and their gradients are
// rounded to bf16 before they enter a product, as flash attention does.
//
// The same bits for any number of threads, any neighbours, and (but on matrix units, where vector
// code serves few queries) for a query alone against its past or inside its sequence: blocks are
// anchored at the start of a document, what a query does not see adds nothing to its sums, and
// nothing is read across a document's border. Memory beyond the outputs is O(longest document) per
// thread, never O(length^2).
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

// Document d has the queries [query_offsets[d], query_offsets[d + 1]) and the first key_lengths[d]
// (all, if null) of the keys [key_offsets[d], key_offsets[d + 1]). Offsets ascend; equal ones are
// an empty document, so an array of fixed length is padded with the number of tokens. Rows outside
// every document give 0 and take no gradient.
struct AttentionDocuments {
  std::size_t count;
  const std::int32_t* query_offsets;  // count + 1
  const std::int32_t* key_offsets;    // count + 1
  const std::int32_t* key_lengths;    // count, or nullptr
};

struct AttentionProblem {
  DType dtype;  // of q, k, v, out and their gradients
  std::size_t query_tokens, key_tokens;
  std::size_t heads, kv_heads;       // heads is a multiple of kv_heads
  std::size_t key_size, value_size;  // 1 to kLargestAttentionHead
  bool causal;
  std::int64_t window;  // keys seen to the left, its own position included; 0: no limit
  float scale;          // >= 0
  float softcap;        // 0: none
  const float* sinks;   // a logit per head, or nullptr
  AttentionDocuments documents;
};
inline constexpr std::size_t kLargestAttentionHead = 512;
inline constexpr std::int64_t kFewQueries = 4;

struct AttentionForward {
  AttentionProblem problem;
  HeadsView q, k, v;
  MutableHeadsView out;  // [query_tokens, heads, value_size], every row written
  float* lse;            // [heads, query_tokens], natural logarithm; 0 outside every document
};

struct AttentionBackward {
  AttentionProblem problem;
  HeadsView q, k, v, out, dout;
  const float* lse;             // as the forward wrote it
  MutableHeadsView dq, dk, dv;  // every row written
  float* dsinks;                // [heads], or nullptr
};

// Throw Error for sizes and offsets that contradict each other. `threads` is how many the caller's
// pool has: it chooses how work is cut, never a bit of the result.
void varlen_attention(const AttentionForward& job, ParallelFor parallel_for, int threads);
void varlen_attention_backward(const AttentionBackward& job, ParallelFor parallel_for, int threads);

// Every variant, best instruction set first.
using AttentionVariant = Variant<const struct AttentionKernels, ByDType>;
const std::vector<AttentionVariant>& varlen_attention_variants();

void varlen_attention_with(const AttentionVariant& variant, const AttentionForward& job,
                           ParallelFor parallel_for, int threads);
void varlen_attention_backward_with(const AttentionVariant& variant, const AttentionBackward& job,
                                    ParallelFor parallel_for, int threads);

}  // namespace monograph
