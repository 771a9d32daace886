// The formulas of panels and chunks, and the table of crossovers.
#include <gtest/gtest.h>

#include <algorithm>

#include "monograph/gpu/crossover.h"
#include "monograph/gpu/panels.h"

namespace monograph::gpu {
namespace {

TEST(Panels, CoverTheWeightOnceAndStayWithinTheBound) {
  for (const std::size_t bytes : {2u, 4u})
    for (const std::size_t across : {1u, 96u, 4096u, 14336u, 1048576u})
      for (const std::size_t extent : {1u, 127u, 128u, 4097u, 14336u, 152064u, 262147u}) {
        const PanelCut cut = cut_panels(extent, across, bytes);
        std::size_t next = 0, largest = 0;
        for (std::size_t i = 0; i < cut.count; ++i) {
          ASSERT_EQ(cut.begin(i), next);
          ASSERT_GT(cut.end(i), cut.begin(i));
          largest = std::max(largest, cut.end(i) - cut.begin(i));
          next = cut.end(i);
        }
        EXPECT_EQ(next, extent);
        EXPECT_EQ(largest * across, cut.scratch_elements());
        const std::size_t scratch = cut.scratch_elements() * bytes;
        EXPECT_LE(scratch, extent * across * bytes);
        EXPECT_LE(scratch, std::max(kPanelBytes, kPanelStep * across * bytes))
            << extent << " x " << across;
        // No more panels than whole tiles in the bound ask for.
        const std::size_t tiles =
            std::max(kPanelBytes / (kPanelStep * across * bytes), std::size_t{1});
        EXPECT_LE(cut.count, (extent + tiles * kPanelStep - 1) / (tiles * kPanelStep));
      }
}

TEST(Panels, OfKnownWeights) {
  // 4096 x 4096 in bf16 is 32 MiB: one panel. 14336 x 4096 is 112 MiB: two of 56.
  EXPECT_EQ(cut_panels(4096, 4096, 2).count, 1u);
  const PanelCut up = cut_panels(14336, 4096, 2);
  EXPECT_EQ(up.count, 2u);
  EXPECT_EQ(up.size, 7168u);
  EXPECT_EQ(up.scratch_elements() * 2, std::size_t{56} << 20);
  // A head of 152,064 x 4096: 1188 MiB in 19 panels of 64 MiB at most.
  EXPECT_EQ(cut_panels(152064, 4096, 2).count, 19u);
  EXPECT_EQ(cut_panels(0, 4096, 2).count, 0u);
  // A sum over nothing is still a result.
  EXPECT_EQ(cut_panels(4096, 0, 2).count, 1u);
  EXPECT_EQ(cut_panels(4096, 0, 2).scratch_elements(), 0u);
}

TEST(Panels, ChunksOfTokens) {
  EXPECT_EQ(chunk_tokens(100, 32000, 2), 100u);
  EXPECT_EQ(chunk_tokens(8192, 32000, 2), kChunkTokens);
  EXPECT_EQ(chunk_tokens(8192, 152064, 2), kLogitsBytes / (152064 * 2));
  EXPECT_EQ(chunk_tokens(8192, kLogitsBytes, 4), 1u);
  EXPECT_EQ(chunk_tokens(0, 32000, 2), 0u);
  EXPECT_EQ(chunk_tokens(7, 0, 2), 7u);
}

TEST(Crossover, TheTableIsInOrderAndWithinWhatTheKernelsTake) {
  const std::span<const Crossover> rows = crossovers();
  ASSERT_FALSE(rows.empty());
  EXPECT_EQ(rows.front().capability, 0);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_LE(rows[i].fused_rows, kFusedRows);
    EXPECT_EQ(fused_rows(rows[i].capability, DType::kBFloat16), rows[i].fused_rows);
    EXPECT_EQ(fused_rows(rows[i].capability, DType::kFloat16), rows[i].fused_rows);
    EXPECT_EQ(fused_rows(rows[i].capability, DType::kFloat32),
              std::min(rows[i].fused_rows, std::size_t{8}));
    if (i != 0) EXPECT_LT(rows[i - 1].capability, rows[i].capability);
  }
}

TEST(Crossover, EveryArchitectureOfTheLibraryHasARow) {
  for (const int built : {80, 86, 89, 90, 100, 120})
    EXPECT_TRUE(std::ranges::any_of(crossovers(), [&](const Crossover& row) {
      return row.capability == built;
    })) << built;
  EXPECT_EQ(fused_rows(75, DType::kFloat16), crossovers().front().fused_rows);
  EXPECT_EQ(fused_rows(121, DType::kBFloat16), crossovers().front().fused_rows);
}

}  // namespace
}  // namespace monograph::gpu
