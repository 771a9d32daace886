// The loops, threads and scratch memory around the kernels of an instruction set: how a product is
// cut, from sizes and caches, and the product itself. None of it changes the result.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "monograph/cpu/parallel.h"
#include "monograph/kernels/linear/kernels.h"
#include "monograph/kernels/linear/products.h"

namespace monograph {

// Of the second-level cache of one core.
std::size_t cache_bytes();

inline constexpr std::size_t kSharedBytes = std::size_t{4} << 20;

// `count` cut into the fewest pieces of at most `most`, all alike, rounded up to a multiple of
// `unit`.
constexpr std::size_t even_piece(std::size_t count, std::size_t most, std::size_t unit) {
  if (count == 0) return unit;
  const std::size_t pieces = (count + most - 1) / most;
  const std::size_t piece = (count + pieces - 1) / pieces;
  return (piece + unit - 1) / unit * unit;
}

// The packed left operand has half of the second-level cache and stays there while the weight
// passes through once. More rows would decode the weight less often, a longer reduction would carry
// fewer sums through memory: an eighth of the cache for a chunk (256 rows where it has 2 MiB) was
// the best of 128, 256, 512.
inline Blocking choose_blocking(const LinearKernels& kernels, std::size_t rows, std::size_t cache) {
  const std::size_t left_most = std::clamp(cache / 2, kSharedBytes / 16, kSharedBytes / 4);
  const std::size_t chunk_bytes = kernels.packed_row_bytes(kernels.chunk) * kernels.block;
  const std::size_t by_cache =
      std::max(left_most / 4 / chunk_bytes, std::size_t{1}) * kernels.block;
  const std::size_t fit = std::max(left_most / chunk_bytes, std::size_t{1}) * kernels.block;
  const std::size_t most = kernels.pass_rows == 0 ? by_cache : std::min(kernels.pass_rows, fit);
  Blocking b;
  b.rows = even_piece(rows, most, kernels.block);
  b.left_bytes = left_most;
  b.sums_bytes = kSharedBytes - b.left_bytes;
  return b;
}

// A list of products. The reduction of each is cut into chunks. As many as fit have their left
// operand packed at the same time, a load; for each load the weight's panels are decoded and
// multiplied, in parallel. Between loads the sums of the panels wait in memory as fp32, which
// changes nothing.
//
// Products of one load each, which those of few rows or columns are, go through together: one
// parallel region packs the left operands of as many as the scratch memory holds, one that several
// share but once, and one multiplies. Tables of codes are filled once for a weight and serve all
// products and rows.
class BlockedProducts {
 public:
  // The arguments must outlive the products.
  BlockedProducts(const LinearKernels& kernels, std::size_t element_bytes,
                  std::span<const LinearProduct> products);
  void run(ParallelFor parallel_for) const;

 private:
  // The products that go through together.
  class Batch;

  struct Tables {
    Format format;
    float tensor;
    bool scaled, divides;
    std::unique_ptr<CodeTables> filled;
  };

  // `range`: the rows it is for, or nullptr for all.
  void add_term(BlockedProduct& product, const LinearTerm& term, const RowRange* range);
  const CodeTables* tables_of(const LinearKernels& kernels, const LinearWeight& weight);
  void run_block(const LinearKernels& kernels, std::size_t block, std::byte* shared,
                 ParallelFor parallel_for) const;
  void run_waiting(const BlockedProduct& product, std::size_t first, std::size_t rows,
                   std::byte* shared, ParallelFor parallel_for) const;

  const std::size_t element_bytes_;
  std::vector<BlockedProduct> products_;
  std::vector<Tables> tables_;
};

}  // namespace monograph
