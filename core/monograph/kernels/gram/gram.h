// Sums over tokens of outer products, the gradients of LoRA factors:
//   out[i, j] = sum[i, j] + left[0, i] right[0, j] + left[1, i] right[1, j] + ...
// One chain of fused multiply-adds in fp32, in the order of the tokens, from `sum` or from 0; one
// rounding at the end, to the type of `out`.
//
// The same bits on every instruction set and for any number of threads, and also if the tokens come
// in slices, each call continuing the fp32 sum of the one before.
#pragma once

#include <cstddef>
#include <vector>

#include "monograph/base/dtype.h"
#include "monograph/cpu/parallel.h"
#include "monograph/cpu/variant.h"
#include "monograph/kernels/keys.h"
#include "monograph/kernels/linear/operands.h"

namespace monograph {

struct GramProblem {
  DType dtype;         // of both factors
  Matrix left, right;  // [tokens, rows], [tokens, cols]
  const float* sum;    // [rows, cols], over the tokens before, or nullptr; may be `out`
  DType out_dtype;
  void* out;  // [rows, cols], contiguous; overlaps neither factor
};

void gram(const GramProblem& problem, ParallelFor parallel_for);

// Columns of the narrower factor that a tile holds, and of the wider one that rows of sums are a
// multiple of.
inline constexpr std::size_t kGramTile = 4, kGramStrip = 32;
// Tokens of one pass over the sums, at most.
inline constexpr std::size_t kGramTokens = 64;

// Tokens [begin, end) of `rank` columns to tiles [(rank + 3) / 4][tokens][4] in fp32, zeros behind
// the last column.
struct GramTiles {
  const void* narrow;
  std::size_t stride, rank, tokens;
  float* tiles;
};

// sums[i, j] += over the tokens, narrow column i times wide column j.
struct GramBlock {
  const float* tiles;  // of the first token
  std::size_t tile_stride, tile_count;
  const void* wide;
  std::size_t stride, cols;
  std::size_t tokens;  // at most kGramTokens
  float* sums;         // [4 tile_count, sums_stride]; `cols` rounded up to strips is written
  std::size_t sums_stride;
};

// out[i, j] = in[i, j] rounded, or out[j, i] if `turned`.
struct GramStore {
  const float* in;
  std::size_t in_stride, rows, cols;
  bool turned;
  void* out;
  std::size_t out_stride;
};

struct GramKernels {
  void (*pack)(const GramTiles& job, std::size_t begin, std::size_t end);
  void (*add)(const GramBlock& job);
  void (*store)(const GramStore& job);  // to the type of the row
};

// Every variant by type, best instruction set first.
const std::vector<Variant<const GramKernels, ByDType>>& gram_variants();

}  // namespace monograph
