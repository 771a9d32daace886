// A list of products, and what its blocking makes of it for the threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "monograph/kernels/linear/kernels.h"

namespace monograph {

inline constexpr std::uint32_t kSkippedRow = 0xffffffff;

// out = gain * (sum over terms of left * weight) + bias, one of a list. Row i of the left operands
// is row left_rows[i] of each term's matrix, and row i of the result is written to row out_rows[i]
// of `out`; without a list row i is row i. No two rows are written to the same place. A row whose
// number is kSkippedRow in either list is left out: it costs nothing, and nothing is written.
// Column c of `out` is entry first_col + c of each weight: a strip of a wide result at a time.
struct LinearProduct {
  std::span<const LinearTerm> terms;
  MutableMatrix out;
  std::size_t rows = 0;
  const std::uint32_t* left_rows = nullptr;
  const std::uint32_t* out_rows = nullptr;
  const void* bias = nullptr;   // [out.cols] in the call's type; forward only, as the gain
  const float* gain = nullptr;  // [out.cols], on the fp32 sums before they are rounded
  std::size_t first_col = 0;
};

struct Blocking {
  std::size_t rows;        // of the left operand at a time: a multiple of the kernels' block
  std::size_t left_bytes;  // packed left operand resident at a time
  std::size_t sums_bytes;  // partial sums that wait in memory for the next chunks
};

// A product, cut.
struct BlockedProduct {
  struct Chunk {
    const LinearTerm* term;  // nullptr where there is nothing to sum
    std::size_t begin, count;
    std::size_t left_offset;  // in its load
    const CodeTables* tables;
  };
  struct Load {
    std::size_t first, last;  // chunks
  };

  const LinearProduct* given;
  const LinearKernels* kernels;
  Blocking blocking;
  std::size_t rows;                // that are not skipped
  const std::uint32_t* left_rows;  // of these; nullptr if row i is row i
  const std::uint32_t* out_rows;
  const std::uint32_t* places;      // of the given rows: left rows of terms in order
  std::vector<std::uint32_t> kept;  // what they point to, where rows are skipped
  std::vector<Chunk> chunks;
  std::vector<Load> loads;

  const std::uint32_t* rows_of(const LinearTerm& term) const {
    return term.in_order ? places : left_rows;
  }
  std::size_t blocks(std::size_t count) const {
    return (count + kernels->block - 1) / kernels->block;
  }
  std::size_t panels() const { return (given->out.cols + kernels->panel - 1) / kernels->panel; }
  std::size_t packed_bytes(const Chunk& chunk, std::size_t count) const {
    return blocks(count) * kernels->block * kernels->packed_row_bytes(chunk.count);
  }
  std::size_t sums_bytes(std::size_t count) const {
    return blocks(count) * kernels->block * kernels->panel * sizeof(float);
  }
};

// Some panels of some rows of a product, for the chunks of one load.
struct PanelStage {
  const BlockedProduct* product;
  BlockedProduct::Load load;
  std::size_t first, rows;  // of the product
  std::size_t first_panel, panels;
  std::size_t pieces;                  // a panel's rows are cut into so many units of work
  std::vector<const std::byte*> left;  // packed, of each chunk of the load
  float* sums;                         // of the panels; nullptr where they need not wait
  std::size_t begin_unit;              // the units of the stages before it
  std::size_t end_unit() const { return begin_unit + panels * pieces; }
};

// One thread's share of some stages of the same kernels, units [from, to) of all of them: it walks
// through panels and decodes the next one while it multiplies. The last stage ends with or after
// `to`.
void run_units(std::span<const PanelStage> stages, std::size_t element_bytes, std::size_t from,
               std::size_t to);

}  // namespace monograph
