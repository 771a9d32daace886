#include <gtest/gtest.h>

#include <vector>

#include "monograph/cpu/isa.h"
#include "monograph/kernels/roofline/roofline.h"

namespace monograph {
namespace {

TEST(Roofline, MoveWritesEveryByte) {
  std::vector<std::uint8_t> in(1024), out(4096, 0xff);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<std::uint8_t>(i / 16);
  move_bytes(in.data(), in.size(), out.data(), out.size());
  for (std::size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], i / 64);
}

TEST(Roofline, MoveWritesEveryByteOfTwiceAsMany) {
  std::vector<std::uint8_t> in(1024, 7), out(2048, 0xff);
  move_bytes(in.data(), in.size(), out.data(), out.size());
  for (std::size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], 7) << i;
}

TEST(Roofline, TilesCountTheirWorkWhereTheyExist) {
  EXPECT_EQ(tile_products(10), best_isa() == Isa::kAmx ? 10 * 65536.0 : 0.0);
}

TEST(Roofline, VectorsCountTheirWork) {
  const double lanes = best_isa() >= Isa::kAvx512 ? 16 : best_isa() == Isa::kAvx2 ? 8 : 1;
  EXPECT_EQ(vector_products(10), 10 * 2 * 12 * lanes);
  EXPECT_EQ(vector_products(0), 0);
}

}  // namespace
}  // namespace monograph
