// The seam between the driver (chunks, threads, scratch) and the units of the instruction sets:
// what happens to one row of logits.
#pragma once

#include <cstddef>

namespace monograph {

struct LogitsMap {
  float scale = 1;    // above 0
  float softcap = 0;  // 0 for none
};

inline constexpr std::size_t kNoLabel = ~std::size_t{0};

// One row of logits as `linear` gave it.
struct LogitsRow {
  void* logits;
  std::size_t count, label;  // kNoLabel if the label is not among these
  LogitsMap map;
};

// Of z: the largest, sum exp(z - peak), and the label's.
struct RowSums {
  float peak;
  double sum;
  float label;
};

// Of z, with e = exp(z - peak): sum e (z - peak), sum e^2, sum z, and the largest before the label.
struct RowStatistics {
  double weighted, squares, total;
  float before;
};

struct CrossEntropyKernels {
  RowSums (*sums)(const LogitsRow& row);
  RowStatistics (*statistics)(const LogitsRow& row, float peak);
  // Each logit becomes factor * (exp(z - base) * inverse - [it is the label's]) * dz/dlogit.
  void (*gradient)(const LogitsRow& row, float base, float inverse, float factor);
  // Each logit becomes -factor * p * (log p + entropy) * dz/dlogit, with log p = z - lse.
  void (*entropy_gradient)(const LogitsRow& row, float lse, float entropy, float factor);
};

}  // namespace monograph
