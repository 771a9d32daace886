// The variant list and the parallel driver; no intrinsics here.
#include "monograph/kernels/gram/gram.h"

#include <algorithm>
#include <cstring>

#include "monograph/cpu/scratch.h"
#include "targets.h"

namespace monograph {

// Defined once for each instruction set, in scalar.cpp, avx2.cpp, avx512.cpp.
template <class V>
const GramKernels* gram_variant(DType dtype);

const std::vector<Variant<const GramKernels, ByDType>>& gram_variants() {
  static const auto rows = make_variants<const GramKernels>(
      VectorTargets{}, every_dtype(),
      []<class V>(ByDType key) { return gram_variant<V>(key.dtype); });
  return rows;
}

namespace {

// Sums of a chunk of columns, which the second-level cache holds; longer rows of the wide factor
// are read at once than a strip.
constexpr std::size_t kSumsOfChunk = 32768, kMostStrips = 16;

constexpr std::size_t round_up(std::size_t x, std::size_t to) { return (x + to - 1) / to * to; }

// Tokens of a pass: each is a page of the wide factor, and where nothing is converted first every
// strip walks over all of them.
constexpr std::size_t tokens_of_pass(std::size_t rank) {
  return rank <= 2 * kGramTile ? kGramTokens / 2 : kGramTokens;
}

// Which factor is the narrow one changes no bit: a product has no order.
struct Operands {
  Matrix narrow, wide;
  bool turned;  // `out` is [wide, narrow]
};

class Chunks {
 public:
  Chunks(const GramProblem& problem, const Operands& operands, const float* tiles)
      : problem_(problem),
        operands_(operands),
        tiles_(tiles),
        kernels_(*pick(gram_variants(), problem.dtype)),
        rank_(operands.narrow.cols),
        width_(operands.wide.cols),
        tile_count_((rank_ + kGramTile - 1) / kGramTile),
        strips_(std::clamp<std::size_t>(kSumsOfChunk / (tile_count_ * kGramTile * kGramStrip), 1,
                                        kMostStrips)),
        // A power of two would put all rows into few sets of the cache.
        stride_(strips_ * kGramStrip + 16) {}

  // Columns of the strips [begin, end).
  void run(std::size_t begin, std::size_t end) const {
    const std::size_t rows = tile_count_ * kGramTile;
    const Scratch scratch(ScratchUse::kSums, rows * stride_ * sizeof(float));
    float* const sums = reinterpret_cast<float*>(scratch.data());
    for (std::size_t strip = begin; strip < end; strip += strips_) {
      const std::size_t first = strip * kGramStrip;
      const std::size_t last = std::min(std::min(strip + strips_, end) * kGramStrip, width_);
      start(first, last - first, sums);
      add(first, last - first, sums);
      finish(first, last - first, sums);
    }
  }

 private:
  void start(std::size_t first, std::size_t cols, float* sums) const {
    std::memset(sums, 0, tile_count_ * kGramTile * stride_ * sizeof(float));
    const float* const sum = problem_.sum;
    if (sum == nullptr) return;
    for (std::size_t i = 0; i < rank_; ++i)
      for (std::size_t j = 0; j < cols; ++j)
        sums[i * stride_ + j] =
            operands_.turned ? sum[(first + j) * rank_ + i] : sum[i * width_ + first + j];
  }
  void add(std::size_t first, std::size_t cols, float* sums) const {
    const std::size_t tokens = operands_.wide.rows, pass = tokens_of_pass(rank_);
    const auto* const wide = static_cast<const std::byte*>(operands_.wide.data);
    for (std::size_t t = 0; t < tokens; t += pass)
      kernels_.add({tiles_ + t * kGramTile, tokens * kGramTile, tile_count_,
                    wide + (t * operands_.wide.stride + first) * size_bytes(problem_.dtype),
                    operands_.wide.stride, cols, std::min(pass, tokens - t), sums, stride_});
  }
  void finish(std::size_t first, std::size_t cols, const float* sums) const {
    const std::size_t place = operands_.turned ? first * rank_ : first;
    pick(gram_variants(), problem_.out_dtype)
        ->store({sums, stride_, rank_, cols, operands_.turned,
                 static_cast<std::byte*>(problem_.out) + place * size_bytes(problem_.out_dtype),
                 operands_.turned ? rank_ : width_});
  }

  const GramProblem& problem_;
  const Operands& operands_;
  const float* tiles_;
  const GramKernels& kernels_;
  std::size_t rank_, width_, tile_count_, strips_, stride_;
};

}  // namespace

void gram(const GramProblem& problem, ParallelFor parallel_for) {
  Operands operands = {problem.left, problem.right, false};
  if (problem.left.cols > problem.right.cols) operands = {problem.right, problem.left, true};
  const std::size_t rank = operands.narrow.cols, tokens = operands.narrow.rows;
  if (rank == 0) return;
  const Scratch scratch(ScratchUse::kShared,
                        round_up(rank, kGramTile) * std::max<std::size_t>(tokens, 1) * 4);
  float* const tiles = reinterpret_cast<float*>(scratch.data());
  const GramKernels& kernels = *pick(gram_variants(), problem.dtype);
  const GramTiles job = {operands.narrow.data, operands.narrow.stride, rank, tokens, tiles};
  parallel_for(tokens, std::max<std::size_t>(16384 / rank, 1),
               [&](std::size_t begin, std::size_t end) { kernels.pack(job, begin, end); });
  const Chunks chunks(problem, operands, tiles);
  parallel_for((operands.wide.cols + kGramStrip - 1) / kGramStrip, 4,
               [&](std::size_t begin, std::size_t end) { chunks.run(begin, end); });
}

}  // namespace monograph
