#include "monograph/kernels/linear/blocking.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <utility>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"
#include "monograph/cpu/scratch.h"

namespace monograph {
namespace {

using Chunk = BlockedProduct::Chunk;
using Load = BlockedProduct::Load;

// Panels that keep any pool busy without cutting their rows as well.
constexpr std::size_t kEnoughPanels = 64;
constexpr std::size_t kMostPieces = 8;

constexpr std::size_t line_aligned(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

std::size_t pieces_of(const BlockedProduct& product, std::size_t rows, std::size_t panels) {
  // With few panels the rows are cut too, or most threads would be idle.
  return panels >= kEnoughPanels ? 1 : std::min(product.blocks(rows), kMostPieces);
}

// A block of rows of one chunk of the left operand.
struct PackUnit {
  const BlockedProduct* product;
  const Chunk* chunk;
  std::size_t row, rows;  // of the product
  std::byte* out;
};

void add_units(const BlockedProduct& product, const Chunk& chunk, std::size_t first,
               std::size_t rows, std::byte* out, std::vector<PackUnit>& units) {
  const std::size_t height = product.kernels->block;
  const BlockSpan span = product.blocks_of(chunk, first, rows);
  for (std::size_t b = span.begin; chunk.count != 0 && b < span.end; ++b) {
    const std::size_t row = b * height;
    units.push_back({&product, &chunk, first + row, std::min(height, rows - row), out});
    out += product.block_bytes(chunk);
  }
}

// Rows that lie apart are brought together first; the kernels know one stride.
void pack_gathered(const PackUnit& unit, const std::uint32_t* rows, std::size_t element_bytes) {
  const Matrix& left = unit.chunk->term->left;
  const std::size_t bytes = unit.chunk->count * element_bytes;
  const Scratch scratch(ScratchUse::kLocal, unit.rows * bytes);
  const auto* data = static_cast<const std::byte*>(left.data);
  for (std::size_t i = 0; i < unit.rows; ++i) {
    const std::size_t at = rows[unit.row + i] * left.stride + unit.chunk->begin;
    std::memcpy(scratch.data() + i * bytes, data + at * element_bytes, bytes);
  }
  unit.product->kernels->pack(
      {scratch.data(), unit.chunk->count, unit.rows, 0, unit.chunk->count, unit.out});
}

void pack(const std::vector<PackUnit>& units, std::size_t element_bytes, ParallelFor parallel_for) {
  parallel_for(units.size(), 1, [&](std::size_t from, std::size_t to) {
    for (std::size_t i = from; i < to; ++i) {
      const PackUnit& unit = units[i];
      const std::uint32_t* const rows = unit.product->rows_of(*unit.chunk->term);
      if (rows != nullptr) {
        pack_gathered(unit, rows, element_bytes);
        continue;
      }
      const Matrix& left = unit.chunk->term->left;
      const auto* data = static_cast<const std::byte*>(left.data);
      unit.product->kernels->pack({data + unit.row * left.stride * element_bytes, left.stride,
                                   unit.rows, unit.chunk->begin, unit.chunk->count, unit.out});
    }
  });
}

void multiply(std::span<const PanelStage> stages, std::size_t element_bytes,
              ParallelFor parallel_for) {
  parallel_for(stages.back().end_unit(), 1, [&](std::size_t from, std::size_t to) {
    run_units(stages, element_bytes, from, to);
  });
}

// The rows that are not skipped, as lists of both sides.
void keep_rows(BlockedProduct& product) {
  const LinearProduct& given = *product.given;
  const auto row_of = [](const std::uint32_t* rows, std::size_t i) {
    return rows == nullptr ? static_cast<std::uint32_t>(i) : rows[i];
  };
  const auto skipped = [&](std::size_t i) {
    return row_of(given.left_rows, i) == kSkippedRow || row_of(given.out_rows, i) == kSkippedRow;
  };
  if (given.left_rows == nullptr && given.out_rows == nullptr) return;
  std::vector<std::uint32_t>& kept = product.kept;
  for (std::size_t i = 0; i < given.rows; ++i)
    if (!skipped(i)) kept.push_back(static_cast<std::uint32_t>(i));
  const std::size_t rows = kept.size();
  if (rows == given.rows) return;
  product.rows = rows;
  kept.resize(3 * rows);
  for (std::size_t i = 0; i < rows; ++i) {
    kept[rows + i] = row_of(given.left_rows, kept[i]);
    kept[2 * rows + i] = row_of(given.out_rows, kept[i]);
  }
  product.places = kept.data();
  product.left_rows = kept.data() + rows;
  product.out_rows = kept.data() + 2 * rows;
}

// The most blocks that a chunk meets in a pass.
std::size_t most_blocks(const BlockedProduct& product, const Chunk& chunk) {
  const std::size_t all = product.blocks(product.blocking.rows);
  return chunk.range == nullptr ? all : std::min(all, product.blocks(chunk.range->rows) + 1);
}

void group_chunks(BlockedProduct& product) {
  const LinearKernels& k = *product.kernels;
  std::size_t used = 0;
  product.loads.push_back({0, 0});
  for (std::size_t i = 0; i < product.chunks.size(); ++i) {
    const Chunk& chunk = product.chunks[i];
    const std::size_t bytes = most_blocks(product, chunk) * product.block_bytes(chunk);
    const std::size_t before = product.loads.back().first;
    // Chunks of ranges together are about one for all rows.
    const bool joins = chunk.range != nullptr && product.chunks[before].range != nullptr;
    const bool full = i - before >= k.load_chunks && !joins;
    if (used != 0 && (full || used + bytes > product.blocking.left_bytes)) {
      product.loads.push_back({i, i});
      used = 0;
    }
    product.chunks[i].left_offset = used;
    used += bytes;
    product.loads.back().last = i + 1;
  }
}

// Of the pass that begins at row `first`.
RowParts cut_blocks(const BlockedProduct& product, std::size_t first) {
  const std::size_t height = product.kernels->block;
  const std::size_t end = std::min(first + product.blocking.rows, product.rows);
  const std::size_t blocks = product.blocks(end - first);
  RowParts cut = {{}, {0}, blocks};
  const RowRange* range = product.given->ranges.data();
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::size_t begin = first + b * height, stop = std::min(begin + height, end);
    bool first_sums = true;
    for (std::size_t row = begin; row < stop;) {
      while (range->end() <= row) ++range;
      const std::size_t to = std::min(range->end(), stop);
      std::size_t slot = b;
      if (!range->terms.empty() && !std::exchange(first_sums, false)) slot = cut.slots++;
      cut.parts.push_back({range, row - begin, to - begin, slot});
      row = to;
    }
    cut.of_block.push_back(cut.parts.size());
  }
  return cut;
}

void check_ranges(const LinearProduct& given) {
  std::size_t next = 0;
  bool in_order = given.ranges.size() <= kMostRanges;
  for (const RowRange& range : given.ranges) {
    in_order = in_order && range.first == next;
    next = range.end();
  }
  if (given.ranges.empty() ||
      (in_order && next == given.rows && given.left_rows == nullptr && given.out_rows == nullptr &&
       given.bias == nullptr && given.gain == nullptr))
    return;
  throw Error("linear: the ranges of rows do not make up the product");
}

}  // namespace

std::size_t cache_bytes() {
  static const long found = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return found > 0 ? static_cast<std::size_t>(found) : std::size_t{1} << 20;
}

class BlockedProducts::Batch {
 public:
  Batch(std::byte* shared, std::size_t element_bytes)
      : shared_(shared), element_bytes_(element_bytes) {}

  // Runs what it has first where the memory would not hold one more.
  void add(const BlockedProduct& product, std::size_t first, std::size_t rows,
           ParallelFor parallel_for) {
    if (used_ + bytes_of(product, first, rows) > kSharedBytes) run(parallel_for);
    PanelStage stage = {&product, product.loads[0], first, rows, 0, product.panels(), 1,
                        {},       nullptr,          0};
    for (std::size_t i = 0; i < product.chunks.size();) {
      const LinearTerm* const term = product.chunks[i].term;
      const bool ranged = product.chunks[i].range != nullptr;
      std::optional<std::size_t> at;
      if (!ranged) at = find(product, term, first, rows);
      const bool is_new = !at;
      if (is_new) {
        at = used_;
        if (!ranged) packed_.push_back({&product, term, first, rows, used_});
      }
      std::byte* out = shared_ + *at;
      for (; i < product.chunks.size() && product.chunks[i].term == term; ++i) {
        stage.left.push_back(out);
        if (is_new) add_units(product, product.chunks[i], first, rows, out, units_);
        out += product.packed_bytes(product.chunks[i], first, rows);
      }
      if (is_new) used_ = line_aligned(static_cast<std::size_t>(out - shared_));
    }
    stages_.push_back(std::move(stage));
  }

  void run(ParallelFor parallel_for) {
    if (stages_.empty()) return;
    std::size_t panels = 0, unit = 0;
    for (const PanelStage& stage : stages_) panels += stage.panels;
    for (PanelStage& stage : stages_) {
      stage.pieces = pieces_of(*stage.product, stage.rows, panels);
      stage.begin_unit = unit;
      unit = stage.end_unit();
    }
    pack(units_, element_bytes_, parallel_for);
    multiply(stages_, element_bytes_, parallel_for);
    stages_.clear();
    units_.clear();
    packed_.clear();
    used_ = 0;
  }

 private:
  // The left operand of a term stands there packed.
  struct Packed {
    const BlockedProduct* product;
    const LinearTerm* term;
    std::size_t first, rows, at;
  };

  std::optional<std::size_t> find(const BlockedProduct& product, const LinearTerm* term,
                                  std::size_t first, std::size_t rows) const {
    for (const Packed& packed : packed_) {
      if (term == nullptr || packed.term == nullptr) continue;
      const Matrix &a = packed.term->left, &b = term->left;
      if (a.data == b.data && a.stride == b.stride && a.cols == b.cols &&
          packed.product->rows_of(*packed.term) == product.rows_of(*term) &&
          packed.first == first && packed.rows == rows)
        return packed.at;
    }
    return std::nullopt;
  }

  std::size_t bytes_of(const BlockedProduct& product, std::size_t first, std::size_t rows) const {
    std::size_t bytes = 0;
    for (const Chunk& chunk : product.chunks)
      if (chunk.range != nullptr || !find(product, chunk.term, first, rows))
        bytes += line_aligned(product.packed_bytes(chunk, first, rows));
    return bytes;
  }

  std::byte* const shared_;
  const std::size_t element_bytes_;
  std::size_t used_ = 0;
  std::vector<Packed> packed_;
  std::vector<PackUnit> units_;
  std::vector<PanelStage> stages_;
};

BlockedProducts::BlockedProducts(const LinearKernels& kernels, std::size_t element_bytes,
                                 std::span<const LinearProduct> products)
    : element_bytes_(element_bytes) {
  products_.reserve(products.size());
  for (const LinearProduct& given : products) {
    BlockedProduct product = {&given,         &kernels, {}, given.rows, given.left_rows,
                              given.out_rows, nullptr,  {}, {},         {}};
    check_ranges(given);
    keep_rows(product);
    if (product.rows == 0 || given.out.cols == 0) continue;
    product.kernels = &kernels.for_rows(product.rows);
    product.blocking = choose_blocking(*product.kernels, product.rows, cache_bytes());
    for (const LinearTerm& term : given.terms) add_term(product, term, nullptr);
    // Nothing to sum: one empty chunk still gives zeros and the bias.
    if (product.chunks.empty()) product.chunks.push_back({nullptr, 0, 0, 0, nullptr});
    for (const RowRange& range : given.ranges)
      for (const LinearTerm& term : range.terms)
        if (range.rows != 0) add_term(product, term, &range);
    group_chunks(product);
    for (std::size_t row = 0; !given.ranges.empty() && row < product.rows;
         row += product.blocking.rows)
      product.passes.push_back(cut_blocks(product, row));
    products_.push_back(std::move(product));
  }
}

void BlockedProducts::add_term(BlockedProduct& product, const LinearTerm& term,
                               const RowRange* range) {
  const LinearKernels& k = *product.kernels;
  if (k.decoder(term.weight.packed.format) == nullptr)
    throw Error("linear: no variant for this format");
  const CodeTables* tables = tables_of(k, term.weight);
  for (std::size_t r = 0; r < term.left.cols; r += k.chunk)
    product.chunks.push_back({&term, r, std::min(k.chunk, term.left.cols - r), 0, tables, range});
}

// They depend on the format and, if it has one, the scale of the matrix.
const CodeTables* BlockedProducts::tables_of(const LinearKernels& kernels,
                                             const LinearWeight& weight) {
  const ScalesView& scales = weight.packed.scales;
  const bool scaled = scales.tensor != nullptr, each = scales.blocks_per_tensor != 0;
  const float tensor = scaled ? load_f32(scales.tensor) : 0.0f;
  for (const Tables& tables : tables_)
    if (tables.format == weight.packed.format && !each && tables.scaled == scaled &&
        std::bit_cast<std::uint32_t>(tables.tensor) == std::bit_cast<std::uint32_t>(tensor) &&
        tables.divides == scales.tensor_divides)
      return tables.filled.get();
  auto filled = std::make_unique_for_overwrite<CodeTables>();
  if (!kernels.fill_tables(weight, *filled)) return nullptr;
  tables_.push_back(
      {weight.packed.format, tensor, scaled, scales.tensor_divides, std::move(filled)});
  return tables_.back().filled.get();
}

void BlockedProducts::run(ParallelFor parallel_for) const {
  if (products_.empty()) return;
  const Scratch shared(ScratchUse::kShared, kSharedBytes);
  std::vector<const LinearKernels*> kinds;
  std::size_t blocks = 0;
  for (const BlockedProduct& product : products_) {
    if (std::find(kinds.begin(), kinds.end(), product.kernels) == kinds.end())
      kinds.push_back(product.kernels);
    blocks = std::max(blocks, (product.rows + product.blocking.rows - 1) / product.blocking.rows);
  }
  for (std::size_t block = 0; block < blocks; ++block)
    for (const LinearKernels* kernels : kinds)
      run_block(*kernels, block, shared.data(), parallel_for);
}

// The rows of one block of every product: several blocks at once would push each other's left
// operands out of the cache.
void BlockedProducts::run_block(const LinearKernels& kernels, std::size_t block, std::byte* shared,
                                ParallelFor parallel_for) const {
  Batch batch(shared, element_bytes_);
  for (const BlockedProduct& product : products_) {
    const std::size_t first = block * product.blocking.rows;
    if (product.kernels != &kernels || first >= product.rows) continue;
    const std::size_t rows = std::min(product.blocking.rows, product.rows - first);
    if (product.loads.size() == 1) {
      batch.add(product, first, rows, parallel_for);
    } else {
      batch.run(parallel_for);
      run_waiting(product, first, rows, shared, parallel_for);
    }
  }
  batch.run(parallel_for);
}

void BlockedProducts::run_waiting(const BlockedProduct& product, std::size_t first,
                                  std::size_t rows, std::byte* shared,
                                  ParallelFor parallel_for) const {
  const Blocking& blocking = product.blocking;
  float* const sums = reinterpret_cast<float*>(shared + blocking.left_bytes);
  const std::size_t panels = product.panels();
  const std::size_t most =
      std::max<std::size_t>(blocking.sums_bytes / product.sums_bytes(first, blocking.rows), 1);
  const std::size_t together = even_piece(panels, most, 1);
  for (std::size_t p = 0; p < panels; p += together) {
    const std::size_t count = std::min(together, panels - p);
    for (const Load& load : product.loads) {
      std::vector<PackUnit> units;
      PanelStage stage = {&product, load, first, rows, p, count, pieces_of(product, rows, count),
                          {},       sums, 0};
      for (std::size_t i = load.first; i < load.last; ++i) {
        std::byte* const out = shared + product.chunks[i].left_offset;
        add_units(product, product.chunks[i], first, rows, out, units);
        stage.left.push_back(out);
      }
      pack(units, element_bytes_, parallel_for);
      multiply({&stage, 1}, element_bytes_, parallel_for);
    }
  }
}

}  // namespace monograph
