// Elements of one type as those of another, and the factors of a LoRA as PEFT lays them out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "monograph/base/dtype.h"
#include "monograph/cpu/parallel.h"

namespace monograph {

void convert(const void* from, DType from_dtype, std::size_t count, void* to, DType to_dtype);

// [rows, cols] to [cols, rows].
void transpose(const void* from, DType from_dtype, std::size_t rows, std::size_t cols, void* to,
               DType to_dtype);

// From the factor of one expert to that of the next, in elements: at powers of two they would fall
// into the same few sets of the caches.
constexpr std::size_t factor_stride(std::size_t size) { return size + 32; }

// B [out, rank E], column j * E + e, to [active, out, rank] or, rank first, [active, rank, out].
struct FactorsJob {
  const void* b;
  DType b_dtype;
  std::size_t experts, rank, out;
  std::span<const std::uint32_t> active;
  DType dtype;
  bool rank_first;
  void* factors;
};
void gather_factors(const FactorsJob& job, ParallelFor parallel_for);

}  // namespace monograph
