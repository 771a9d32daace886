#include "monograph/kernels/linear/blocking.h"

#include <unistd.h>

#include <algorithm>

#include "monograph/base/error.h"
#include "monograph/cpu/scratch.h"

namespace monograph {
namespace {

// Panels that keep any pool busy without cutting their rows as well.
constexpr std::size_t kEnoughPanels = 64;
constexpr std::size_t kMostPieces = 8;

constexpr std::size_t page_aligned(std::size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

}  // namespace

std::size_t cache_bytes() {
  static const long found = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return found > 0 ? static_cast<std::size_t>(found) : std::size_t{1} << 20;
}

// One panel, one chunk, some rows.
struct BlockedProduct::Item {
  std::size_t panel, chunk, row, rows;
};

// One thread's share of a stage: it walks its items and decodes the panel of the next one while it
// multiplies.
class BlockedProduct::Worker {
 public:
  Worker(const BlockedProduct& product, const Stage& stage)
      : p_(product),
        k_(product.k_),
        stage_(stage),
        panel_bytes_(page_aligned(k_.steps(k_.chunk) * k_.panel_step_bytes)),
        scratch_(ScratchUse::kLocal,
                 2 * panel_bytes_ + (stage.sums == nullptr ? p_.sums_bytes(stage.rows) : 0)),
        local_(scratch_.data()) {}

  void run(std::size_t from, std::size_t to) {
    Item item;
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
    while (true) {
      Item next = item;
      const bool more = next_item(from, to, next);
      std::byte* other = job.out == local_ ? local_ + panel_bytes_ : local_;
      DecodeJob next_job = more ? decode_job(next, other) : DecodeJob{};
      const AheadKernels* ahead = more ? k_.ahead_for(next_job, item.rows) : nullptr;
      if (ahead != nullptr) {
        DecodeAhead state = {next_job, 0, p_.blocks(item.rows)};
        multiply(item, job, [&](const MultiplyJob& multiply) { ahead->multiply(multiply, state); });
        ahead->rest(state);
      } else {
        multiply(item, job, k_.multiply);
        if (!more) break;
        next_job.out = job.out;  // where it is still in a near cache
        k_.decode(next_job);
      }
      item = next;
      job = next_job;
    }
  }

  // Units [from, to) that lie in the same panel become one item: a cut costs nothing where one
  // thread has both sides of it. Moves `from` past them.
  bool first_item(std::size_t& from, std::size_t to, Item& item) const {
    const std::size_t piece =
        (p_.blocks(stage_.rows) + stage_.pieces - 1) / stage_.pieces * k_.block;
    while (from < to) {
      const std::size_t begin = from % stage_.pieces;
      const std::size_t end = std::min(stage_.pieces, begin + (to - from));
      const std::size_t panel = from / stage_.pieces;
      from += end - begin;
      const std::size_t row = begin * piece, stop = std::min(end * piece, stage_.rows);
      if (row >= stop) continue;
      item = {panel, stage_.load.first, row, stop - row};
      return true;
    }
    return false;
  }
  bool next_item(std::size_t& from, std::size_t to, Item& item) const {
    if (++item.chunk < stage_.load.last) return true;
    return first_item(from, to, item);
  }

  DecodeJob decode_job(const Item& item, std::byte* out) const {
    const Chunk& chunk = p_.chunks_[item.chunk];
    const std::size_t p = (stage_.first_panel + item.panel) * k_.panel;
    return {chunk.term == nullptr ? nullptr : &chunk.term->weight,
            p,
            std::min(k_.panel, p_.out_.cols - p),
            chunk.begin,
            chunk.count,
            out,
            chunk.tables};
  }

  float* sums_of(const Item& item) const {
    if (stage_.sums == nullptr) return reinterpret_cast<float*>(local_ + 2 * panel_bytes_);
    return stage_.sums + item.panel * p_.sums_bytes(p_.blocking_.rows) / sizeof(float) +
           item.row * k_.panel;
  }

  // product(job) for every block of an item.
  template <class Product>
  void multiply(const Item& item, const DecodeJob& panel, Product&& product) const {
    const Chunk& chunk = p_.chunks_[item.chunk];
    const std::size_t row_bytes = k_.packed_row_bytes(chunk.count);
    const std::byte* left = stage_.left + chunk.left_offset + item.row * row_bytes;
    float* c = sums_of(item);
    const bool last = item.chunk + 1 == p_.chunks_.size();
    for (std::size_t r = 0; r < item.rows; r += k_.block) {
      const std::size_t rows = std::min(k_.block, item.rows - r);
      float* sums = c + r * k_.panel;
      const FinishJob finish = finish_job(sums, stage_.first + item.row + r, rows, panel);
      product(MultiplyJob{left + r * row_bytes, panel.out, rows, panel.width, chunk.count, sums,
                          /*accumulate=*/item.chunk != 0, last ? &finish : nullptr});
    }
  }

  FinishJob finish_job(const float* c, std::size_t row, std::size_t rows,
                       const DecodeJob& panel) const {
    const std::byte* bias = static_cast<const std::byte*>(p_.bias_);
    const std::size_t offset = (row * p_.out_.stride + panel.first) * p_.element_bytes_;
    return {c,
            p_.gain_ == nullptr ? nullptr : p_.gain_ + panel.first,
            bias == nullptr ? nullptr : bias + panel.first * p_.element_bytes_,
            rows,
            panel.width,
            static_cast<std::byte*>(p_.out_.data) + offset,
            p_.out_.stride};
  }

  const BlockedProduct& p_;
  const LinearKernels& k_;
  const Stage& stage_;
  const std::size_t panel_bytes_;
  const Scratch scratch_;
  std::byte* const local_;
};

BlockedProduct::BlockedProduct(const LinearKernels& kernels, const Blocking& blocking,
                               std::size_t element_bytes, std::span<const LinearTerm> terms,
                               const float* gain, const void* bias, const MutableMatrix& out)
    : k_(kernels),
      blocking_(blocking),
      element_bytes_(element_bytes),
      gain_(gain),
      bias_(bias),
      out_(out) {
  for (const LinearTerm& term : terms) add_term(term);
  // Nothing to sum: one empty chunk still gives zeros and the bias.
  if (chunks_.empty()) chunks_.push_back({nullptr, 0, 0, 0, nullptr});
  group_chunks();
}

void BlockedProduct::add_term(const LinearTerm& term) {
  if (k_.decoder(term.weight.packed.format) == nullptr)
    throw Error("linear: no variant for this format");
  const CodeTables* tables = nullptr;
  auto filled = std::make_unique_for_overwrite<CodeTables>();
  if (k_.fill_tables(term.weight, *filled)) {
    tables = filled.get();
    tables_.push_back(std::move(filled));
  }
  for (std::size_t r = 0; r < term.left.cols; r += k_.chunk)
    chunks_.push_back({&term, r, std::min(k_.chunk, term.left.cols - r), 0, tables});
}

void BlockedProduct::group_chunks() {
  std::size_t used = 0;
  loads_.push_back({0, 0});
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    const std::size_t bytes = blocking_.rows * k_.packed_row_bytes(chunks_[i].count);
    const bool full = i - loads_.back().first == k_.load_chunks;
    if (used != 0 && (full || used + bytes > blocking_.left_bytes)) {
      loads_.push_back({i, i});
      used = 0;
    }
    chunks_[i].left_offset = used;
    used += bytes;
    loads_.back().last = i + 1;
  }
}

std::size_t BlockedProduct::reusable_chunks() const {
  if (loads_.size() != 1) return 0;
  const auto other = [&](const Chunk& chunk) { return chunk.term != chunks_[0].term; };
  return static_cast<std::size_t>(std::find_if(chunks_.begin(), chunks_.end(), other) -
                                  chunks_.begin());
}

void BlockedProduct::run(std::size_t first, std::size_t rows, std::size_t packed,
                         ParallelFor parallel_for) const {
  const bool wait = loads_.size() > 1;
  // Always as much, or a product that waits would lose what another left packed for it.
  const Scratch shared(ScratchUse::kShared, blocking_.left_bytes + blocking_.sums_bytes);
  std::byte* const left = shared.data();
  float* sums = wait ? reinterpret_cast<float*>(left + blocking_.left_bytes) : nullptr;
  const std::size_t panels = (out_.cols + k_.panel - 1) / k_.panel;
  const std::size_t most =
      wait ? std::max<std::size_t>(blocking_.sums_bytes / sums_bytes(blocking_.rows), 1) : panels;
  const std::size_t together = even_piece(panels, std::max<std::size_t>(most, 1), 1);
  packed = std::min(packed, loads_[0].last);
  for (std::size_t p = 0; p < panels; p += together) {
    const std::size_t count = std::min(together, panels - p);
    // With few panels the rows are cut too, or most threads would be idle.
    const std::size_t pieces = count >= kEnoughPanels ? 1 : std::min(blocks(rows), kMostPieces);
    for (const Load& load : loads_) {
      pack(load, first, rows, left, packed, parallel_for);
      packed = 0;
      multiply({load, first, rows, p, pieces, left, sums}, count, parallel_for);
    }
  }
}

void BlockedProduct::pack(const Load& load, std::size_t first, std::size_t rows, std::byte* left,
                          std::size_t packed, ParallelFor parallel_for) const {
  const std::size_t begin = load.first + packed, row_blocks = blocks(rows);
  parallel_for((load.last - begin) * row_blocks, 1, [&](std::size_t from, std::size_t to) {
    for (std::size_t i = from; i < to; ++i) {
      const Chunk& chunk = chunks_[begin + i / row_blocks];
      if (chunk.count == 0) continue;
      const std::size_t row = i % row_blocks * k_.block;
      const Matrix& m = chunk.term->left;
      k_.pack({static_cast<const std::byte*>(m.data) + (first + row) * m.stride * element_bytes_,
               m.stride, std::min(k_.block, rows - row), chunk.begin, chunk.count,
               left + chunk.left_offset + row * k_.packed_row_bytes(chunk.count)});
    }
  });
}

void BlockedProduct::multiply(const Stage& stage, std::size_t panels,
                              ParallelFor parallel_for) const {
  parallel_for(panels * stage.pieces, 1,
               [&](std::size_t from, std::size_t to) { Worker(*this, stage).run(from, to); });
}

}  // namespace monograph
