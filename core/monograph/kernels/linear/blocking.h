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

struct Blocking {
  std::size_t rows;        // of the left operand at a time: a multiple of the kernels' block
  std::size_t left_bytes;  // packed left operand resident at a time
  std::size_t sums_bytes;  // partial sums that wait in memory for the next chunks
};

// The packed left operand has half of the second-level cache and stays there while the weight
// passes through once. More rows would decode the weight less often, a longer reduction would carry
// fewer sums through memory: an eighth of the cache for a chunk (256 rows where it has 2 MiB) was
// the best of 128, 256, 512.
inline Blocking choose_blocking(const LinearKernels& kernels, std::size_t rows, std::size_t cache) {
  const std::size_t left_most = std::clamp(cache / 2, kSharedBytes / 16, kSharedBytes / 4);
  const std::size_t chunk_bytes = kernels.packed_row_bytes(kernels.chunk) * kernels.block;
  const std::size_t most = std::max(left_most / 4 / chunk_bytes, std::size_t{1}) * kernels.block;
  Blocking b;
  b.rows = even_piece(rows, most, kernels.block);
  b.left_bytes = left_most;
  b.sums_bytes = kSharedBytes - b.left_bytes;
  return b;
}

// out[M,P] = gain[P] * (sum over terms and r of left[M,r] * weight(p,r)) + bias[P].
//
// The reduction is cut into chunks. As many as fit have their left operand packed at the same time,
// a load; for each load the weight's panels are decoded and multiplied, in parallel. Between loads
// the sums of the panels wait in memory as fp32, which changes nothing.
class BlockedProduct {
 public:
  // The arguments must outlive the product.
  BlockedProduct(const LinearKernels& kernels, const Blocking& blocking, std::size_t element_bytes,
                 std::span<const LinearTerm> terms, const float* gain, const void* bias,
                 const MutableMatrix& out);

  // Rows [first, first + rows) of the output, at most blocking.rows of them. The left operands of
  // the first `packed` chunks stand in the scratch memory already.
  void run(std::size_t first, std::size_t rows, std::size_t packed, ParallelFor parallel_for) const;

  // How many chunks of the first term another product with the same left operand may find there
  // after run().
  std::size_t reusable_chunks() const;

 private:
  struct Chunk {
    const LinearTerm* term;
    std::size_t begin, count, left_offset;
    const CodeTables* tables;
  };
  struct Load {
    std::size_t first, last;  // chunks
  };
  // What all threads of one load share.
  struct Stage {
    Load load;
    std::size_t first, rows;          // of the output
    std::size_t first_panel, pieces;  // a panel's rows are cut into `pieces` units of work
    const std::byte* left;
    float* sums;  // of the panels from first_panel on; nullptr where they need not wait
  };
  struct Item;
  class Worker;

  void add_term(const LinearTerm& term);
  void group_chunks();
  void pack(const Load& load, std::size_t first, std::size_t rows, std::byte* left,
            std::size_t packed, ParallelFor parallel_for) const;
  void multiply(const Stage& stage, std::size_t panels, ParallelFor parallel_for) const;

  std::size_t blocks(std::size_t rows) const { return (rows + k_.block - 1) / k_.block; }
  std::size_t sums_bytes(std::size_t rows) const {
    return blocks(rows) * k_.block * k_.panel * sizeof(float);
  }

  const LinearKernels& k_;
  const Blocking& blocking_;
  const std::size_t element_bytes_;
  const float* const gain_;
  const void* const bias_;
  const MutableMatrix& out_;
  std::vector<std::unique_ptr<CodeTables>> tables_;
  std::vector<Chunk> chunks_;
  std::vector<Load> loads_;
};

}  // namespace monograph
