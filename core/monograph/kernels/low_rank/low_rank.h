// out += scale * left * right in fp64: the change that a LoRA makes to a weight.
//
//   out[i, j] = out[i, j] + scale * (left[i, 0] * right[0, j] + left[i, 1] * right[1, j] + ...)
//
// The sum runs over the rank in order, from 0, without fused operations. The factors hold fp32
// values, so each product is exact in fp64 and a fused multiply-add would give the same bits: every
// instruction set and any number of threads give the same result.
#pragma once

#include <cstddef>
#include <vector>

#include "monograph/cpu/variant.h"

namespace monograph {

inline constexpr std::size_t kLowRankTile = 16;

struct LowRankJob {
  const double* left;  // rows x rank, row-major
  // In tiles of 16 columns, each rank x 16; the last one is filled with zeros.
  const double* right;
  std::size_t rank, cols;
  double scale;
  double* out;  // rows x cols, row-major
};

using LowRankFn = void(const LowRankJob& job, std::size_t rows);

// Best instruction set first.
const std::vector<Variant<LowRankFn>>& low_rank_variants();

void add_low_rank(const LowRankJob& job, std::size_t rows);

}  // namespace monograph
