// slice_rows and PackedGrids: what a cut shares with the whole, and what is refused.
#include <gtest/gtest.h>

#include "monograph/base/error.h"
#include "monograph/formats/slice.h"
#include "monograph/formats/tests/small_weights.h"

namespace monograph {
namespace {

TEST(SliceRows, ASliceOfASliceIsTheSameSlice) {
  for (const SmallWeight& w : small_weights())
    for (std::size_t first = 0; first + 3 <= w.view.rows; ++first) {
      const PackedView once = slice_rows(w.view, first + 1, 2);
      const PackedView twice = slice_rows(slice_rows(w.view, first, 3), 1, 2);
      // The pointers may have moved with the origin, so the first byte is compared.
      const std::size_t per_byte = 8 / static_cast<std::size_t>(w.info->bits);
      EXPECT_EQ(once.values + once.origin / per_byte, twice.values + twice.origin / per_byte);
      EXPECT_EQ(once.origin % w.block, twice.origin % w.block) << w.name << " " << first;
      EXPECT_EQ(once.rows, twice.rows);
    }
}

TEST(SliceRows, OneMatrixOfSeveralIsOneMatrix) {
  const SmallWeight square =
      small_weight("fp8-block", ScaleKind::kFp32, 128, false, {3, 130, 64}, 1);
  const PackedView second = slice_rows(square.view, 130, 130);
  EXPECT_EQ(second.matrix_rows, 0u);
  EXPECT_EQ(second.origin, 0u);
  EXPECT_EQ(second.values, square.values.data() + 130 * 64);
  EXPECT_EQ(second.scales.blocks, square.scales[0].data() + 2 * 4);
  EXPECT_EQ(slice_rows(square.view, 100, 40).matrix_rows, 130u);  // rows of two
  const SmallWeight tensor = small_weight("nvfp4", ScaleKind::kE4m3, 16, false, {3, 4, 32}, 1);
  const PackedView third = slice_rows(tensor.view, 9, 2);
  EXPECT_EQ(third.scales.tensor, tensor.scales[1].data() + 8);
  EXPECT_EQ(third.scales.blocks_per_tensor, 0u);
}

std::string refusal(auto cut) {
  try {
    cut();
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(SliceRows, RowsThatAreNotThereAreRefused) {
  const SmallWeight w = small_weight("nf4", ScaleKind::kFp32, 64, false, {4, 64}, 1);
  EXPECT_EQ(slice_rows(w.view, 4, 0).rows, 0u);
  EXPECT_EQ(refusal([&] { slice_rows(w.view, 3, 2); }),
            "rows from 3 on, 2 of them, are wanted; the weight has 4 rows");
  EXPECT_EQ(refusal([&] { slice_rows(w.view, 5, 0); }),
            "rows from 5 on, 0 of them, are wanted; the weight has 4 rows");
  EXPECT_NE(refusal([&] { slice_rows(w.view, 1, ~std::size_t{0}); }), "");
  PackedGrids grids;
  grids.first = w.view;
  grids.count = 3;
  EXPECT_EQ(refusal([&] { slice_rows(grids, 3, 2); }),
            "rows from 3 on, 2 of them, are wanted; they lie in more than one grid of 4 rows");
  EXPECT_EQ(refusal([&] { slice_rows(grids, 12, 1); }),
            "rows from 12 on, 1 of them, are wanted; the weight has 12 rows");
}

}  // namespace
}  // namespace monograph
