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
    if (stage.sums == nullptr) most = std::max(most, stage.product->sums_bytes(stage.rows));
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
        DecodeAhead state = {next_job, 0, item.stage->product->blocks(item.rows)};
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
      return true;
    }
    return false;
  }
  bool next_item(std::size_t& from, std::size_t to, Item& item) const {
    item.chunk = item.end();
    item.tail = has_tail(*item.stage, item.chunk);
    return item.chunk < item.stage->load.last || first_item(from, to, item);
  }
  bool has_tail(const PanelStage& stage, std::size_t chunk) const {
    return k_.takes_tails && chunk + 1 < stage.load.last &&
           stage.product->chunks[chunk + 1].count <= k_.step;
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

  float* sums_of(const Item& item) const {
    const PanelStage& stage = *item.stage;
    if (stage.sums == nullptr) return reinterpret_cast<float*>(local_ + 2 * panel_bytes_);
    const BlockedProduct& product = *stage.product;
    return stage.sums + item.panel * product.sums_bytes(product.blocking.rows) / sizeof(float) +
           item.row * k_.panel;
  }

  // run(job) for every block of an item.
  template <class Run>
  void multiply(const Item& item, const DecodeJob& panel, Run&& run) const {
    const PanelStage& stage = *item.stage;
    const BlockedProduct& product = *stage.product;
    const BlockedProduct::Chunk& chunk = product.chunks[item.chunk];
    const std::size_t row_bytes = k_.packed_row_bytes(chunk.count);
    const std::byte* left = stage.left[item.chunk - stage.load.first] + item.row * row_bytes;
    float* c = sums_of(item);
    const bool last = item.end() == product.chunks.size();
    const std::byte* tail = item.tail ? stage.left[item.chunk + 1 - stage.load.first] : nullptr;
    const std::size_t tail_bytes = k_.packed_row_bytes(k_.step);
    for (std::size_t r = 0; r < item.rows; r += k_.block) {
      const std::size_t rows = std::min(k_.block, item.rows - r);
      float* sums = c + r * k_.panel;
      const std::size_t row = stage.first + item.row + r;
      const bool scattered = !consecutive(product.out_rows, row, rows);
      const FinishJob finish = finish_job(product, sums, row, rows, panel, scattered);
      run(MultiplyJob{left + r * row_bytes, panel.out, rows, panel.width, chunk.count, sums,
                      /*accumulate=*/item.chunk != 0, last ? &finish : nullptr,
                      item.tail ? tail + (item.row + r) * tail_bytes : nullptr});
      if (last && scattered) scatter(product, finish, row, panel);
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

  // Rows that lie apart are finished beside the sums first.
  FinishJob finish_job(const BlockedProduct& product, const float* c, std::size_t row,
                       std::size_t rows, const DecodeJob& panel, bool scattered) const {
    const LinearProduct& given = *product.given;
    const std::byte* bias = static_cast<const std::byte*>(given.bias);
    const std::size_t col = panel.first - given.first_col;
    return {c,
            given.gain == nullptr ? nullptr : given.gain + col,
            bias == nullptr ? nullptr : bias + col * element_bytes_,
            rows,
            panel.width,
            scattered ? local_ + 2 * panel_bytes_ + sums_bytes_ : place(product, row, col),
            scattered ? k_.panel : given.out.stride};
  }

  void scatter(const BlockedProduct& product, const FinishJob& finish, std::size_t row,
               const DecodeJob& panel) const {
    const auto* from = static_cast<const std::byte*>(finish.out);
    const std::size_t col = panel.first - product.given->first_col;
    for (std::size_t i = 0; i < finish.rows; ++i)
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
