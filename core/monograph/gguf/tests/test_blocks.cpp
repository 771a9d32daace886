#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/gguf/blocks.h"

namespace monograph::gguf {
namespace {

using Block = std::array<float, kBlock>;

float half_at(const std::uint8_t* bytes) {
  Fp16 half{};
  std::memcpy(&half, bytes, sizeof half);
  return to_float(half);
}

// Every finite bf16 number below 2^16 in magnitude, 31 at a time behind `first`.
template <class Body>
void each_block_behind(float first, Body body) {
  Block block{};
  std::size_t at = 0;
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const float value = to_float(Bf16{static_cast<std::uint16_t>(bits)});
    if (!(std::fabs(value) <= std::fabs(first))) continue;
    if (at == 0) block[at++] = first;
    block[at++] = value;
    if (at < kBlock) continue;
    body(block);
    at = 0;
  }
}

TEST(GgufBlocks, Q8IsTheNearestOf255StepsForEveryBf16Number) {
  for (const float first : {1.0f, -3.5f, 65000.0f}) {
    each_block_behind(first, [](const Block& block) {
      std::array<std::uint8_t, 34> out{};
      encode_q8_0(block.data(), 1, out.data());
      const float scale = std::fabs(block[0]) / 127, inverse = 1 / scale;
      ASSERT_EQ(half_at(out.data()), to_float(from_float<Fp16>(scale)));
      for (std::size_t i = 0; i < kBlock; ++i) {
        ASSERT_EQ(static_cast<std::int8_t>(out[2 + i]), std::round(block[i] * inverse)) << block[i];
      }
    });
  }
}

TEST(GgufBlocks, Q4IsTheNearestOf16StepsForEveryBf16Number) {
  for (const float first : {1.0f, -3.5f, 65000.0f}) {
    each_block_behind(first, [](const Block& block) {
      std::array<std::uint8_t, 18> out{};
      encode_q4_0(block.data(), 1, out.data());
      const float scale = block[0] / -8, inverse = 1 / scale;
      ASSERT_EQ(half_at(out.data()), to_float(from_float<Fp16>(scale)));
      for (std::size_t i = 0; i < kBlock; ++i) {
        const int code = i < 16 ? out[2 + i] & 15 : out[2 + i - 16] >> 4;
        const float wanted = std::fmin(15.0f, std::trunc(block[i] * inverse + 8.5f));
        ASSERT_EQ(static_cast<float>(code), wanted) << block[i];
      }
    });
  }
}

TEST(GgufBlocks, Mxfp4IsTheNearestValueForEveryBf16Number) {
  constexpr std::array<float, 16> kValues = {0, .5f,  1,  1.5f,  2,  3,  4,  6,
                                             0, -.5f, -1, -1.5f, -2, -3, -4, -6};
  for (const float first : {1.0f, -3.5f, 6.0f, 7.9f, 0x1p-120f}) {
    each_block_behind(first, [&](const Block& block) {
      std::array<std::uint8_t, 17> out{};
      encode_mxfp4(block.data(), 1, out.data());
      const int exponent = static_cast<int>(std::floor(std::log2(std::fabs(block[0])))) - 2;
      ASSERT_EQ(out[0], exponent + 127);
      for (std::size_t i = 0; i < kBlock; ++i) {
        std::size_t best = 0;
        for (std::size_t code = 1; code < 16; ++code) {
          const auto error = [&](std::size_t c) {
            return std::fabs(std::ldexp(kValues[c], exponent) - block[i]);
          };
          if (error(code) < error(best)) best = code;
        }
        const unsigned code = i < 16 ? out[1 + i] & 15 : out[1 + i - 16] >> 4;
        ASSERT_EQ(code, best) << block[i];
      }
    });
  }
}

TEST(GgufBlocks, Mxfp4KeepsEveryBlockOfMxfp4) {
  constexpr std::array<float, 8> kMagnitudes = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
  for (int exponent = -120; exponent <= 120; exponent += 8) {
    for (std::size_t largest = 0; largest < 8; ++largest) {
      Block block{};
      for (std::size_t i = 0; i < kBlock; ++i) {
        const float magnitude = kMagnitudes[i % (largest + 1)];
        block[i] = std::ldexp(i % 3 == 0 ? -magnitude : magnitude, exponent);
      }
      std::array<std::uint8_t, 17> out{};
      encode_mxfp4(block.data(), 1, out.data());
      for (std::size_t i = 0; i < kBlock; ++i) {
        const unsigned code = i < 16 ? out[1 + i] & 15 : out[1 + i - 16] >> 4;
        const float value = std::ldexp(kMagnitudes[code & 7], out[0] - 127);
        ASSERT_EQ(code > 7 ? -value : value, block[i]);
      }
    }
  }
}

TEST(GgufBlocks, ZerosAndTheSmallestNumbersAreZeroBlocks) {
  for (const float value : {0.0f, -0.0f, 0x1p-149f, -0x1p-140f}) {
    Block block{};
    block.fill(value);
    std::array<std::uint8_t, 34> q8{};
    encode_q8_0(block.data(), 1, q8.data());
    EXPECT_EQ(half_at(q8.data()), 0);
    std::array<std::uint8_t, 18> q4{};
    encode_q4_0(block.data(), 1, q4.data());
    EXPECT_EQ(half_at(q4.data()), 0);
    std::array<std::uint8_t, 17> mxfp4{};
    encode_mxfp4(block.data(), 1, mxfp4.data());
    EXPECT_EQ(mxfp4[0], 0);
  }
}

}  // namespace
}  // namespace monograph::gguf
