// The cross entropy of a language model's head, without the matrix of logits:
//   z[t,v]  = cap(scale * (x[t] . W[v] + bias[v]))       cap(z) = softcap * tanh(z / softcap), or z
//   loss[t] = log sum_v exp(z[t,v]) - z[t, label[t]]
//   dx[t]   = d loss[t] / d x[t]
// Tokens go through in chunks: logits by the kernels of `linear`, a row of them turned in place
// into its gradient, dx by those of `linear_dx`. The logits are rounded to the type of the
// activations, as a head that is called on its own does; everything of a row is fp32 from there,
// its sum over the vocabulary fp64 over blocks of 1024; the gradient of the logits is rounded to
// the type of the activations again.
//
// A token whose label is kIgnoredLabel costs nothing: it gets loss 0 and dx 0 and is not computed.
//
// NaN and infinite logits give what torch's cross_entropy gives: NaN or an infinity in the logits
// that count makes the row's loss and gradient NaN, but -inf is a probability of 0, and an infinite
// loss if it is the label's.
//
// A row's bits depend on its own x and label: not on other rows, chunks or threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "monograph/kernels/keys.h"
#include "monograph/kernels/linear/linear.h"
#include "monograph/kernels/linear_cross_entropy/kernels.h"

namespace monograph {

inline constexpr std::int64_t kIgnoredLabel = -100;

// Logits that exist at a time: of so many tokens (the rows `linear` takes through the weight at
// once on a core with 2 MiB of cache; more would read the weight no less often), fewer if they are
// more than kLogitsBytes, but one.
inline constexpr std::size_t kChunkTokens = 256;
inline constexpr std::size_t kLogitsBytes = std::size_t{128} << 20;

// The head and the tokens it is asked about. Labels are kIgnoredLabel or in [0, V).
struct CrossEntropyProblem {
  DType dtype;
  Matrix x;                    // [T, K]
  LinearWeight weight;         // [V, K]
  const void* bias;            // [V] in the call's type, or nullptr
  const std::int64_t* labels;  // [T]
  LogitsMap map;
};

// Of the distribution p = softmax(z) of each token, all 0 for one that is ignored: -sum p log p,
// log sum p^2, the mean of z, and whether the label is the most likely (the first of several).
struct TokenStatistics {
  float *entropy, *log_sum_squares, *mean;  // [T]
  bool* top;                                // [T]
};

// loss [T]; lse [T], the log-sum-exp; dx [T, K] in the call's type, or data = nullptr for none;
// statistics unless they are nullptr. No result may overlap an input.
struct CrossEntropyResult {
  float* loss;
  float* lse;
  MutableMatrix dx;
  const TokenStatistics* statistics = nullptr;
};

void linear_cross_entropy(const CrossEntropyProblem& problem, const CrossEntropyResult& result,
                          ParallelFor parallel_for, std::size_t logits_bytes = kLogitsBytes);

// The gradient of a plain weight: dweight[v] = sum_t g[t] * dz[t,v] * x[t], rounded once to the
// call's type, and dbias[v] = sum_t g[t] * dz[t,v] unless it is nullptr. Takes the log-sum-exp of
// the forward, walks through slices of the vocabulary and computes their logits again: each sum
// over tokens has one fp32 accumulator. In addition to `logits_bytes` it holds at most a copy of x.
struct CrossEntropyWeightGradient {
  const float* lse;       // [T]
  const float* g;         // [T]
  MutableMatrix dweight;  // [V, K]
  float* dbias;           // [V] or nullptr
};
void linear_cross_entropy_dw(const CrossEntropyProblem& problem,
                             const CrossEntropyWeightGradient& gradient, ParallelFor parallel_for,
                             std::size_t logits_bytes = kLogitsBytes);

// dx[t] = g[t] * d entropy[t] / d x[t], from the forward's log-sum-exp and entropy; the logits are
// computed again, of those tokens alone whose g is not 0 and whose label is not kIgnoredLabel.
struct EntropyGradient {
  const float *lse, *entropy, *g;  // [T]
  MutableMatrix dx;                // [T, K]
};
void linear_entropy_dx(const CrossEntropyProblem& problem, const EntropyGradient& gradient,
                       ParallelFor parallel_for, std::size_t logits_bytes = kLogitsBytes);

using CrossEntropyVariant = Variant<const CrossEntropyKernels, ByDType>;

// Every variant, best instruction set first.
const std::vector<CrossEntropyVariant>& cross_entropy_variants();

}  // namespace monograph
