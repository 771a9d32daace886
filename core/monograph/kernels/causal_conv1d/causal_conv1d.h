// The short causal convolution of recurrent layers, channel by channel, over documents packed in
// one row of tokens:
//   s[t] = bias + sum over j of weight[j] * x[t - taps + 1 + j]      y[t] = act(s[t]), silu or s
// Before the first token of a document stand the taps - 1 inputs of its state, or zeros; the final
// state is the same after its last token: a document of fewer tokens shifts the state, an empty one
// keeps it. And the gradients, where d[t] = dy[t] * act'(s[t]) and 0 outside the document:
//   dx[t]      = sum over i of weight[taps - 1 - i] * d[t + i], and what its place in the final
//                state got; dstate the same for the places before the first token
//   dweight[j] = sum over t of d[t] * x[t - taps + 1 + j]            dbias = sum over t of d[t]
// Tokens outside every document take no part; their y and dx are 0.
//
// Everything between loads and stores is fp32, one rounding at the end; sums of products are fused
// everywhere, in the order written. dweight and dbias are summed over fixed pieces of the
// documents, these in order. The same bits on every instruction set and for any number of threads;
// those of a document's tokens know nothing of its neighbours or its place in the row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "monograph/base/dtype.h"
#include "monograph/cpu/parallel.h"
#include "monograph/cpu/variant.h"
#include "monograph/kernels/keys.h"

namespace monograph {

inline constexpr std::size_t kMostTaps = 8;

// Element (t, c) stands at data[t * token_stride + c * channel_stride], in elements. One of the
// strides is 1.
struct TokensView {
  const void* data;
  std::size_t token_stride, channel_stride;
};

struct ConvProblem {
  DType dtype;                     // of all but weight and bias
  DType weight_dtype, bias_dtype;  // `dtype` or float32
  std::size_t tokens, channels, taps;
  bool silu;
  TokensView x;
  const void* weight;  // [channels, taps]
  const void* bias;    // [channels] or nullptr
  std::size_t documents;
  const std::int32_t* offsets;  // [documents + 1]
  const void* state;            // [documents, channels, taps - 1] or nullptr
};

// Results are contiguous and overlap no input.
struct ConvForward {
  ConvProblem problem;
  void* y;            // [tokens, channels]
  void* final_state;  // as the state, or nullptr
};

struct ConvBackward {
  ConvProblem problem;
  TokensView dy;
  const void* dfinal;  // as the state, or nullptr
  // Each may be nullptr.
  void* dx;        // [tokens, channels]
  float* dweight;  // [channels, taps]
  float* dbias;    // [channels]
  void* dstate;    // as the state; only where there is one
};

// Tokens [begin, end) of a document that has the tokens [first, last); at most kConvTile.
struct ConvTile {
  std::size_t document, begin, end, first, last;
};
inline constexpr std::size_t kConvTile = 64;

// Channels [from, to) of `count` tiles; at most kConvStrip channels. `sums` is [taps + 1, channels]
// and is added to, the bias last, unless it is nullptr.
struct ConvKernels {
  void (*forward)(const ConvForward& job, const ConvTile* tiles, std::size_t count,
                  std::size_t from, std::size_t to);
  void (*backward)(const ConvBackward& job, const ConvTile* tiles, std::size_t count,
                   std::size_t from, std::size_t to, float* sums);
};
inline constexpr std::size_t kConvStrip = 512;

// Every variant, best instruction set first.
const std::vector<Variant<const ConvKernels, ByDType>>& causal_conv1d_variants();

// Throw an Error that names the offset which is wrong.
void causal_conv1d(const ConvForward& job, ParallelFor parallel_for);
void causal_conv1d_backward(const ConvBackward& job, ParallelFor parallel_for);

}  // namespace monograph
