#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "monograph/kernels/low_rank/low_rank.h"

namespace monograph {
namespace {

TEST(LowRank, EveryVariantGivesTheBitsOfThePlainLoop) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  bool ran = false;
  for (const std::size_t rows : {1, 3, 4, 9}) {
    for (const std::size_t cols : {1, 15, 16, 17, 64, 100}) {
      for (const std::size_t rank : {1, 2, 16, 33}) {
        std::vector<double> left(rows * rank), plain(rank * cols), out(rows * cols), wanted;
        for (auto* values : {&left, &plain, &out}) {
          for (double& value : *values) value = normal(random);
        }
        const std::size_t tiles = (cols + kLowRankTile - 1) / kLowRankTile;
        std::vector<double> right(tiles * rank * kLowRankTile);
        for (std::size_t k = 0; k < rank; ++k) {
          for (std::size_t j = 0; j < cols; ++j) {
            const std::size_t tile = j / kLowRankTile;
            right[(tile * rank + k) * kLowRankTile + j % kLowRankTile] = plain[k * cols + j];
          }
        }
        wanted = out;
        for (std::size_t i = 0; i < rows; ++i) {
          for (std::size_t j = 0; j < cols; ++j) {
            double sum = 0;
            for (std::size_t k = 0; k < rank; ++k) {
              sum = std::fma(left[i * rank + k], plain[k * cols + j], sum);
            }
            wanted[i * cols + j] += 0.3 * sum;
          }
        }
        for (const Variant<LowRankFn>& variant : low_rank_variants()) {
          if (variant.isa > best_isa()) continue;
          ran = true;
          std::vector<double> found = out;
          variant.run({left.data(), right.data(), rank, cols, 0.3, found.data()}, rows);
          ASSERT_EQ(std::memcmp(found.data(), wanted.data(), found.size() * sizeof(double)), 0)
              << name_of(variant.isa) << " " << rows << "x" << cols << " rank " << rank;
        }
      }
    }
  }
  EXPECT_TRUE(ran);
}

}  // namespace
}  // namespace monograph
