// Up to how many rows of x a fused kernel serves `linear`, by architecture; above, panels of the
// weight are decoded and multiplied by the library of the device. The table lies in crossover.cpp.
#pragma once

#include <cstddef>
#include <span>

#include "monograph/base/dtype.h"

namespace monograph::gpu {

// The most rows that the fused kernels take, and those for activations of this type: only 16-bit
// types have one with mma.
inline constexpr std::size_t kFusedRows = 64;
constexpr std::size_t most_fused_rows(DType dtype) {
  return dtype == DType::kFloat32 ? 8 : kFusedRows;
}

struct Crossover {
  int capability;          // 10 * major + minor of the compute capability; 0 for all others
  std::size_t fused_rows;  // 0 to kFusedRows
};

// Ascending by capability; the first is that of architectures without a row of their own.
std::span<const Crossover> crossovers();

// Of the row of this architecture, or of all others, but never more than a kernel of the type
// takes.
std::size_t fused_rows(int capability, DType dtype);

}  // namespace monograph::gpu
