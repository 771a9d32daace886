// A list of products, and what its blocking makes of it for the threads.
#pragma once

#include <algorithm>
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
//
// Ranges of rows may have terms, a bias and a gain of their own, as adapters beside a shared weight
// have: the sums of `terms` are then continued, row by row, with those of the row's range, and with
// nothing of another one. They follow one another and hold every row of the product; row i of
// their left operands is row i of the product, which has no lists of rows, bias or gain then.
struct RowRange {
  std::size_t first = 0, rows = 0;
  std::span<const LinearTerm> terms = {};
  const void* bias = nullptr;
  const float* gain = nullptr;
  std::size_t end() const { return first + rows; }
};

// More of them in one product would need more memory for sums: see linear_ranges().
inline constexpr std::size_t kMostRanges = 32;

struct LinearProduct {
  std::span<const LinearTerm> terms;
  MutableMatrix out;
  std::size_t rows = 0;
  const std::uint32_t* left_rows = nullptr;
  const std::uint32_t* out_rows = nullptr;
  const void* bias = nullptr;   // [out.cols] in the call's type; forward only, as the gain
  const float* gain = nullptr;  // [out.cols], on the fp32 sums before they are rounded
  std::size_t first_col = 0;
  std::span<const RowRange> ranges = {};
};

struct Blocking {
  std::size_t rows;        // of the left operand at a time: a multiple of the kernels' block
  std::size_t left_bytes;  // packed left operand resident at a time
  std::size_t sums_bytes;  // partial sums that wait in memory for the next chunks
};

// Blocks [begin, end) of some rows.
struct BlockSpan {
  std::size_t begin, end;
};

// The rows [first, end) of a block that belong to one range. Where a block has several of those
// with terms, all but the first sum in a slot of their own, behind those of the blocks: they begin
// as copies.
struct RowPart {
  const RowRange* range;
  std::size_t first, end, slot;
};
struct RowParts {
  std::vector<RowPart> parts;         // block by block
  std::vector<std::size_t> of_block;  // where those of each begin, and the end of the last
  std::size_t slots;                  // blocks among them

  std::span<const RowPart> of(std::size_t block) const {
    return {parts.data() + of_block[block], parts.data() + of_block[block + 1]};
  }
};

// A product, cut.
struct BlockedProduct {
  struct Chunk {
    const LinearTerm* term;  // nullptr where there is nothing to sum
    std::size_t begin, count;
    std::size_t left_offset;  // in its load
    const CodeTables* tables;
    const RowRange* range = nullptr;  // whose rows alone it is for
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
  std::vector<Chunk> chunks;        // those for all rows first
  std::vector<Load> loads;
  std::vector<RowParts> passes = {};  // of the blocking's rows each; none without ranges

  const std::uint32_t* rows_of(const LinearTerm& term) const {
    return term.in_order ? places : left_rows;
  }
  std::size_t blocks(std::size_t count) const {
    return (count + kernels->block - 1) / kernels->block;
  }
  std::size_t panels() const { return (given->out.cols + kernels->panel - 1) / kernels->panel; }
  // The blocks of rows [first, first + count) that a chunk meets.
  BlockSpan blocks_of(const Chunk& chunk, std::size_t first, std::size_t count) const {
    if (chunk.range == nullptr) return {0, blocks(count)};
    const std::size_t from = std::max(chunk.range->first, first);
    const std::size_t to = std::min(chunk.range->end(), first + count);
    return from < to ? BlockSpan{(from - first) / kernels->block, blocks(to - first)}
                     : BlockSpan{0, 0};
  }
  std::size_t block_bytes(const Chunk& chunk) const {
    return kernels->block * kernels->packed_row_bytes(chunk.count);
  }
  std::size_t packed_bytes(const Chunk& chunk, std::size_t first, std::size_t count) const {
    const BlockSpan span = blocks_of(chunk, first, count);
    return (span.end - span.begin) * block_bytes(chunk);
  }
  std::size_t slot_floats() const { return kernels->block * kernels->panel; }
  // Of one panel for rows [first, first + count).
  std::size_t sums_bytes(std::size_t first, std::size_t count) const {
    return (blocks(count) + extra_slots(first)) * slot_floats() * sizeof(float);
  }
  const RowParts* parts_of(std::size_t first) const {
    return passes.empty() ? nullptr : &passes[first / blocking.rows];
  }
  std::size_t extra_slots(std::size_t first) const {
    const RowParts* parts = parts_of(first);
    return parts == nullptr ? 0 : parts->slots - (parts->of_block.size() - 1);
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
