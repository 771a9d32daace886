// Dropout whose mask is a function of seed, stream and the place of an element alone:
//   word[i] = Philox's word i of (seed, stream), as mask_words of philox.h has it
//   out[i]  = (word[i] < (1 - probability) 2^32 ? x[i] : x[i] * 0) / (1 - probability)
// in fp32, rounded once. NaN and infinities stay seen: NaN * 0 is NaN.
//
// The words are those of the GPU's kernel. The same bits on every instruction set, for any number
// of threads, and for parts of a tensor, each told where it begins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "monograph/base/dtype.h"
#include "monograph/cpu/parallel.h"
#include "monograph/cpu/variant.h"
#include "monograph/kernels/keys.h"

namespace monograph {

struct DropoutProblem {
  DType dtype;
  const void* x;
  void* out;  // may be x
  std::size_t count;
  std::uint64_t first;  // the place of x[0] in the tensor that the mask is of
  std::uint64_t seed, stream;
  double probability;  // 0 to below 1
};

// Elements [begin, end).
using DropoutFn = void(const DropoutProblem& problem, std::size_t begin, std::size_t end);

// Best instruction set first.
const std::vector<Variant<DropoutFn, ByDType>>& seeded_dropout_variants();

void seeded_dropout(const DropoutProblem& problem, ParallelFor parallel_for);

}  // namespace monograph
