#include "monograph/kernels/experts/gram.h"

#include <algorithm>
#include <cstring>

#include "monograph/cpu/dynamic_schedule.h"
#include "monograph/cpu/scratch.h"
#include "monograph/kernels/experts/factors.h"

namespace monograph {
namespace {

// Columns of a unit: two lines of a row of 16-bit elements, which the caches fetch together.
constexpr std::size_t kCols = kTileCols;

// Columns [first, first + cols) of the i-th active expert to [rank, stride] floats.
void run_gram(const ExpertsLayer& layer, const GramRows& small, const ExpertsRows& large,
              std::size_t i, std::size_t first, std::size_t cols, float* out, std::size_t stride) {
  const std::size_t place = layer.routing.first(i);
  const auto* data = static_cast<const std::byte*>(large.matrix.data) + first * layer.element();
  if (!large.by_token) data += place * large.matrix.stride * layer.element();
  const std::uint32_t* const rows = large.by_token ? layer.routing.tokens.data() + place : nullptr;
  const GramJob job = {
      small.rank, layer.routing.rows(i), data, large.matrix.stride, rows, cols, out, stride};
  if (small.kernels == nullptr)
    return layer.kernels.gram(job, small.small.data() + place * small.rank);
  alignas(64) std::byte scratch[kGramScratch];
  small.kernels->gram(job, small.tiles.data() + small.offsets[i], scratch);
}

// On a thread around its sums.
class InTiles {
 public:
  explicit InTiles(const GramRows& small) : kernels_(small.kernels) {
    if (kernels_ != nullptr) kernels_->enter();
  }
  ~InTiles() {
    if (kernels_ != nullptr) kernels_->leave();
  }
  InTiles(const InTiles&) = delete;
  InTiles& operator=(const InTiles&) = delete;

 private:
  const ExpertsTiles* kernels_;
};

}  // namespace

GramRows gram_rows(const ExpertsLayer& layer, const Buffer& u, std::size_t rank,
                   const float* factors) {
  GramRows rows = {std::vector<float>(layer.kept() * rank), rank};
  convert(u.data(), layer.problem.dtype, rows.small.size(), rows.small.data(), DType::kFloat32);
  for (std::size_t place = 0; factors != nullptr && place < layer.kept(); ++place)
    for (std::size_t j = 0; j < rank; ++j) rows.small[place * rank + j] *= factors[place];
  rows.kernels = pick_experts_tiles(layer.problem.dtype);
  if (rows.kernels == nullptr) return rows;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < layer.routing.active.size(); ++i) {
    rows.offsets.push_back(bytes);
    bytes += small_tiles(rank, layer.routing.rows(i));
  }
  rows.tiles = Buffer(bytes);
  dynamic_schedule(rows.offsets.size(), layer.parallel_for, [&](std::size_t i) {
    rows.kernels->pack_small({rows.small.data() + layer.routing.first(i) * rank, rank,
                              layer.routing.rows(i), rows.tiles.data() + rows.offsets[i]});
  });
  return rows;
}

void gram_to_rows(const ExpertsLayer& layer, const GramRows& small, const ExpertsRows& large,
                  void* out, DType dtype) {
  const std::size_t rank = small.rank, width = large.matrix.cols, bytes = size_bytes(dtype);
  const std::size_t pieces = (width + kCols - 1) / kCols, active = layer.routing.active.size();
  auto* const rows = static_cast<std::byte*>(out);
  prefer_huge_pages(out, layer.problem.experts * rank * width * bytes);
  if (active != layer.problem.experts)
    std::memset(rows, 0, layer.problem.experts * rank * width * bytes);
  layer.parallel_for(active * pieces, 1, [&](std::size_t begin, std::size_t end) {
    const Scratch scratch(ScratchUse::kSums, rank * kCols * sizeof(float));
    const InTiles tiles(small);
    float* const sums = reinterpret_cast<float*>(scratch.data());
    for (std::size_t unit = begin; unit < end; ++unit) {
      const std::size_t i = unit / pieces, first = unit % pieces * kCols;
      const std::size_t cols = std::min(kCols, width - first);
      run_gram(layer, small, large, i, first, cols, sums, kCols);
      for (std::size_t j = 0; j < rank; ++j)
        convert(sums + j * kCols, DType::kFloat32, cols,
                rows + ((layer.routing.active[i] * rank + j) * width + first) * bytes, dtype);
    }
  });
}

void gram_to_columns(const ExpertsLayer& layer, const GramRows& small, const ExpertsRows& large,
                     void* out, DType dtype) {
  const std::size_t rank = small.rank, width = large.matrix.cols, bytes = size_bytes(dtype);
  const std::size_t experts = layer.problem.experts, stride = rank * experts, each = rank * kCols;
  const std::vector<std::uint32_t>& active = layer.routing.active;
  auto* const transpose_tile = pick_experts(dtype).transpose_floats;
  prefer_huge_pages(out, width * stride * bytes);
  layer.parallel_for((width + kCols - 1) / kCols, 1, [&](std::size_t begin, std::size_t end) {
    // [E, rank, kCols]; zeros for experts without rows.
    const Scratch scratch(ScratchUse::kSums, experts * each * sizeof(float) + 1);
    const InTiles tiles(small);
    float* const sums = reinterpret_cast<float*>(scratch.data());
    if (active.size() != experts) std::memset(sums, 0, experts * each * sizeof(float));
    for (std::size_t first = begin * kCols; first < std::min(end * kCols, width); first += kCols) {
      const std::size_t cols = std::min(kCols, width - first);
      for (std::size_t i = 0; i < active.size(); ++i)
        run_gram(layer, small, large, i, first, cols, sums + active[i] * each, kCols);
      for (std::size_t c = 0; c < cols; c += kTileSide)
        for (std::size_t j = 0; j < rank; ++j)
          for (std::size_t e = 0; e < experts; e += kTileSide)
            transpose_tile(
                {sums + (e * rank + j) * kCols + c, each, std::min(kTileSide, experts - e),
                 std::min(kTileSide, cols - c), kInOrder,
                 static_cast<std::byte*>(out) + ((first + c) * stride + j * experts + e) * bytes,
                 stride});
    }
  });
}

}  // namespace monograph
