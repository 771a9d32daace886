// One thread's share of the panels of a list of products.
#include <algorithm>
#include <cstring>

#include "monograph/cpu/scratch.h"
#include "monograph/kernels/linear/products.h"

namespace monograph {
namespace {

constexpr std::size_t page_aligned(std::size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

// One panel, one chunk, some rows; with a tail the next chunk too, which has one step.
struct Item {
  const PanelStage* stage;
  std::size_t panel, chunk, row, rows;
  bool tail;
  std::size_t end() const { return chunk + (tail ? 2 : 1); }
};

// The sums of a stage's panels that need not wait for other chunks.
std::size_t local_sums(std::span<const PanelStage> stages) {
  std::size_t most = 0;
  for (const PanelStage& stage : stages)
    if (stage.sums == nullptr)
      most = std::max(most, stage.product->sums_bytes(stage.first, stage.rows));
  return most;
}

class Worker {
 public:
  Worker(std::span<const PanelStage> stages, std::size_t element_bytes)
      : stages_(stages),
        k_(*stages[0].product->kernels),
        element_bytes_(element_bytes),
        panel_bytes_(page_aligned((k_.steps(k_.chunk) + 1) * k_.panel_step_bytes)),
        sums_bytes_(local_sums(stages)),
        scratch_(ScratchUse::kLocal,
                 2 * panel_bytes_ + sums_bytes_ + k_.block * k_.panel * element_bytes),
        local_(scratch_.data()) {}

  void run(std::size_t from, std::size_t to) {
    Item item = {&stages_[0], 0, 0, 0, 0, false};
    if (!first_item(from, to, item)) return;
    k_.begin_thread();
    if (k_.multiplies_directly())
      run_directly(from, to, item);
    else
      run_ahead(from, to, item);
    k_.end_thread();
  }

 private:
  void run_directly(std::size_t from, std::size_t to, Item item) const {
    do {
      const DecodeJob job = decode_job(item, local_);
      DirectFn* direct = k_.direct_for(job);
      if (direct == nullptr) k_.decode(job);
      multiply(item, job, [&](const MultiplyJob& multiply) {
        if (direct != nullptr)
          direct(multiply, job);
        else
          k_.multiply(multiply);
      });
    } while (next_item(from, to, item));
  }

  void run_ahead(std::size_t from, std::size_t to, Item item) const {
    DecodeJob job = decode_job(item, local_);
    k_.decode(job);
    decode_tail(item, job);
    while (true) {
      Item next = item;
      const bool more = next_item(from, to, next);
      std::byte* other = job.out == local_ ? local_ + panel_bytes_ : local_;
      DecodeJob next_job = more ? decode_job(next, other) : DecodeJob{};
      const AheadKernels* ahead = more ? k_.ahead_for(next_job, item.rows) : nullptr;
      if (ahead != nullptr) {
        const BlockSpan span = blocks_of(item);
        DecodeAhead state = {next_job, 0, span.end - span.begin};
        multiply(item, job, [&](const MultiplyJob& multiply) { ahead->multiply(multiply, state); });
        ahead->rest(state);
      } else {
        multiply(item, job, k_.multiply);
        if (!more) break;
        next_job.out = job.out;  // where it is still in a near cache
        k_.decode(next_job);
      }
      decode_tail(next, next_job);
      item = next;
      job = next_job;
    }
  }

  // Units [from, to) that lie in the same panel become one item: a cut costs nothing where one
  // thread has both sides of it. Moves `from` past them.
  bool first_item(std::size_t& from, std::size_t to, Item& item) const {
    const PanelStage* stage = item.stage;
    while (from < to) {
      while (from >= stage->end_unit()) ++stage;
      const std::size_t unit = from - stage->begin_unit, pieces = stage->pieces;
      const std::size_t piece =
          (stage->product->blocks(stage->rows) + pieces - 1) / pieces * k_.block;
      const std::size_t begin = unit % pieces, end = std::min(pieces, begin + (to - from));
      from += end - begin;
      const std::size_t row = begin * piece, stop = std::min(end * piece, stage->rows);
      if (row >= stop) continue;
      const std::size_t chunk = stage->load.first;
      item = {stage, unit / pieces, chunk, row, stop - row, has_tail(*stage, chunk)};
      if (with_rows(item)) return true;
    }
    return false;
  }
  bool next_item(std::size_t& from, std::size_t to, Item& item) const {
    item.chunk = item.end();
    return with_rows(item) || first_item(from, to, item);
  }
  // Goes on to a chunk that has something to do with the item's rows.
  bool with_rows(Item& item) const {
    for (; item.chunk < item.stage->load.last; ++item.chunk) {
      const BlockSpan span = blocks_of(item);
      item.tail = has_tail(*item.stage, item.chunk);
      if (span.begin < span.end) return true;
    }
    return false;
  }
  bool has_tail(const PanelStage& stage, std::size_t chunk) const {
    return k_.takes_tails && chunk + 1 < stage.load.last &&
           stage.product->chunks[chunk + 1].count <= k_.step &&
           stage.product->chunks[chunk + 1].range == nullptr;
  }
  // Of the stage's.
  BlockSpan blocks_of(const Item& item) const {
    const PanelStage& stage = *item.stage;
    const BlockSpan span =
        stage.product->blocks_of(stage.product->chunks[item.chunk], stage.first, stage.rows);
    const std::size_t first = item.row / k_.block;
    return {std::max(span.begin, first),
            std::min(span.end, first + stage.product->blocks(item.rows))};
  }

  // Behind the panel of its item.
  void decode_tail(const Item& item, const DecodeJob& panel) const {
    if (!item.tail) return;
    Item tail = item;
    ++tail.chunk;
    k_.decode(decode_job(tail, panel.out + k_.steps(panel.count) * k_.panel_step_bytes));
  }

  DecodeJob decode_job(const Item& item, std::byte* out) const {
    const BlockedProduct& product = *item.stage->product;
    const BlockedProduct::Chunk& chunk = product.chunks[item.chunk];
    const std::size_t p = (item.stage->first_panel + item.panel) * k_.panel;
    return {chunk.term == nullptr ? nullptr : &chunk.term->weight,
            product.given->first_col + p,
            std::min(k_.panel, product.given->out.cols - p),
            chunk.begin,
            chunk.count,
            out,
            chunk.tables};
  }

  // The sums of a panel lie slot by slot: those of the blocks, then those of further ranges.
  float* sums_of(const Item& item, std::size_t slot) const {
    const PanelStage& stage = *item.stage;
    const BlockedProduct& product = *stage.product;
    const std::size_t at = slot * product.slot_floats();
    if (stage.sums == nullptr) return reinterpret_cast<float*>(local_ + 2 * panel_bytes_) + at;
    const std::size_t each = product.sums_bytes(stage.first, product.blocking.rows);
    return stage.sums + item.panel * each / sizeof(float) + at;
  }

  // run(job) for every block of an item.
  template <class Run>
  void multiply(const Item& item, const DecodeJob& panel, Run&& run) const {
    const PanelStage& stage = *item.stage;
    const BlockedProduct& product = *stage.product;
    const BlockedProduct::Chunk& chunk = product.chunks[item.chunk];
    const std::size_t bytes = product.block_bytes(chunk);
    const std::size_t packed = product.blocks_of(chunk, stage.first, stage.rows).begin;
    const std::byte* left = stage.left[item.chunk - stage.load.first];
    const bool last =
        item.end() == product.chunks.size() || product.chunks[item.end()].range != chunk.range;
    const std::byte* tail = item.tail ? stage.left[item.chunk + 1 - stage.load.first] : nullptr;
    const std::size_t tail_bytes = k_.packed_row_bytes(k_.step);
    const BlockSpan span = blocks_of(item);
    for (std::size_t b = span.begin; b < span.end; ++b) {
      const std::size_t r = b * k_.block, rows = std::min(k_.block, stage.rows - r);
      MultiplyJob job = {left + (b - packed) * bytes,
                         panel.out,
                         rows,
                         panel.width,
                         chunk.count,
                         sums_of(item, b),
                         /*accumulate=*/item.chunk != 0,
                         nullptr,
                         item.tail ? tail + r * tail_bytes : nullptr};
      if (product.passes.empty())
        multiply_rows(product, stage.first + r, panel, last, job, run);
      else
        multiply_parts(item, b, panel, last, job, run);
    }
  }

  template <class Run>
  void multiply_rows(const BlockedProduct& product, std::size_t row, const DecodeJob& panel,
                     bool last, MultiplyJob job, Run&& run) const {
    const bool scattered = !consecutive(product.out_rows, row, job.rows);
    const Output output = {product.given->bias, product.given->gain, scattered};
    const FinishJob finish = finish_job(product, output, job.c, row, job.rows, panel);
    if (last) job.finish = &finish;
    run(job);
    if (last && scattered) scatter(product, finish, row, {0, job.rows}, panel);
  }

  // The same where rows belong to ranges: after the last chunk for all rows each range has its own
  // sums, and is finished after its own last chunk.
  template <class Run>
  void multiply_parts(const Item& item, std::size_t block, const DecodeJob& panel, bool last,
                      MultiplyJob job, Run&& run) const {
    const BlockedProduct& product = *item.stage->product;
    const RowRange* const range = product.chunks[item.chunk].range;
    const std::span<const RowPart> parts = product.parts_of(item.stage->first)->of(block);
    const std::size_t row = item.stage->first + block * k_.block;
    const auto output_of = [&](const RowPart& part) {
      return Output{part.range->bias, part.range->gain, part.end - part.first != job.rows};
    };
    if (range != nullptr) {
      const RowPart& part = *std::find_if(parts.begin(), parts.end(),
                                          [&](const RowPart& p) { return p.range == range; });
      const Output output = output_of(part);
      job.c = sums_of(item, part.slot);
      const FinishJob finish = finish_job(product, output, job.c, row, job.rows, panel);
      if (last) job.finish = &finish;
      run(job);
      if (last && output.apart) scatter(product, finish, row, {part.first, part.end}, panel);
      return;
    }
    run(job);
    if (!last) return;
    for (const RowPart& part : parts) {
      if (!part.range->terms.empty()) {
        if (part.slot != block)
          std::memcpy(sums_of(item, part.slot), job.c, product.slot_floats() * sizeof(float));
        continue;
      }
      const Output output = output_of(part);
      const FinishJob finish = finish_job(product, output, job.c, row, job.rows, panel);
      k_.finish(finish);
      if (output.apart) scatter(product, finish, row, {part.first, part.end}, panel);
    }
  }

  static bool consecutive(const std::uint32_t* rows, std::size_t first, std::size_t count) {
    for (std::size_t i = 1; rows != nullptr && i < count; ++i)
      if (rows[first + i] != rows[first] + i) return false;
    return true;
  }

  std::byte* place(const BlockedProduct& product, std::size_t row, std::size_t col) const {
    const MutableMatrix& out = product.given->out;
    const std::size_t at = product.out_rows == nullptr ? row : product.out_rows[row];
    return static_cast<std::byte*>(out.data) + (at * out.stride + col) * element_bytes_;
  }

  // `apart`: the rows are finished beside the sums first, and then copied.
  struct Output {
    const void* bias;
    const float* gain;
    bool apart;
  };
  FinishJob finish_job(const BlockedProduct& product, const Output& output, const float* c,
                       std::size_t row, std::size_t rows, const DecodeJob& panel) const {
    const std::byte* bias = static_cast<const std::byte*>(output.bias);
    const std::size_t col = panel.first - product.given->first_col;
    return {c,
            output.gain == nullptr ? nullptr : output.gain + col,
            bias == nullptr ? nullptr : bias + col * element_bytes_,
            rows,
            panel.width,
            output.apart ? local_ + 2 * panel_bytes_ + sums_bytes_ : place(product, row, col),
            output.apart ? k_.panel : product.given->out.stride};
  }

  // Rows [first, end) of what was finished apart.
  struct Rows {
    std::size_t first, end;
  };
  void scatter(const BlockedProduct& product, const FinishJob& finish, std::size_t row,
               const Rows& rows, const DecodeJob& panel) const {
    const auto* from = static_cast<const std::byte*>(finish.out);
    const std::size_t col = panel.first - product.given->first_col;
    for (std::size_t i = rows.first; i < rows.end; ++i)
      std::memcpy(place(product, row + i, col), from + i * finish.stride * element_bytes_,
                  finish.width * element_bytes_);
  }

  const std::span<const PanelStage> stages_;
  const LinearKernels& k_;
  const std::size_t element_bytes_, panel_bytes_, sums_bytes_;
  const Scratch scratch_;
  std::byte* const local_;
};

}  // namespace

void run_units(std::span<const PanelStage> stages, std::size_t element_bytes, std::size_t from,
               std::size_t to) {
  Worker(stages, element_bytes).run(from, to);
}

}  // namespace monograph
