// The seam to sets with tiles, for bf16: products whose result is as narrow as a rank, and sums
// over tokens. What they do not have runs on `linear_products` and on vectors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "monograph/cpu/variant.h"
#include "monograph/kernels/experts/kernels.h"
#include "monograph/kernels/keys.h"
#include "monograph/kernels/linear/operands.h"

namespace monograph {

enum class NarrowFactor : std::uint8_t {
  kRows,     // [rank, x.cols]
  kFloats,   // the same in fp32, which is rounded
  kColumns,  // [x.cols, rank]
};

// out[i, j] = scale * sum over k of x[rows[i], k] * factor[j, k], rounded; without `rows` row i is
// row i. One chain over tiles of 32 columns, whatever the count.
struct NarrowJob {
  Matrix x;
  const std::uint32_t* rows;
  std::size_t count;
  const void* factor;
  NarrowFactor kind;
  std::size_t rank;
  float scale;
  void* out;           // [count, rank]
  std::byte* scratch;  // narrow_scratch bytes, aligned to 64
};
constexpr std::size_t narrow_scratch(std::size_t cols) { return (cols + 31) / 32 * 1024 + 10240; }

// `count` rows of `rank` numbers to tiles: each number is a bf16 and what that leaves, as another.
struct SmallTilesJob {
  const float* small;
  std::size_t rank, count;
  std::byte* tiles;  // small_tiles bytes, aligned to 64
};
constexpr std::size_t small_tiles(std::size_t rank, std::size_t count) {
  return (rank + 15) / 16 * ((count + 31) / 32) * 2048;
}

// Of `gram`: up to so many columns, and bytes of its scratch memory, aligned to 64.
inline constexpr std::size_t kTileCols = 64, kGramScratch = 8192;

struct ExpertsTiles {
  void (*enter)();  // on a thread before and after the others
  void (*leave)();
  void (*narrow)(const NarrowJob& job);
  void (*pack_small)(const SmallTilesJob& job);
  // One chain over tiles of 32 tokens.
  void (*gram)(const GramJob& job, const std::byte* tiles, std::byte* scratch);
};

// Best instruction set first; sets without tiles have no rows.
const std::vector<Variant<const ExpertsTiles, ByDType>>& experts_tiles_variants();
// nullptr where there are none for the type.
const ExpertsTiles* pick_experts_tiles(DType dtype);

}  // namespace monograph
