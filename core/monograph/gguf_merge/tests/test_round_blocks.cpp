// Codes of random blocks, and what rounding does to them.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "monograph/gguf/decode_blocks.h"
#include "monograph/gguf_merge/block_grid.h"
#include "monograph/gguf_merge/round_blocks.h"

namespace monograph::gguf {
namespace {

constexpr TensorType kTypes[] = {TensorType::kQ4,    TensorType::kQ4Min, TensorType::kQ5,
                                 TensorType::kQ8,    TensorType::kQ5Min, TensorType::kQ4K,
                                 TensorType::kQ5K,   TensorType::kQ6K,   TensorType::kIQ4,
                                 TensorType::kIQ4Xs, TensorType::kMxfp4};
constexpr std::size_t kColumns = 1024;

struct Row {
  std::vector<std::uint8_t> blocks;
  std::vector<float> values;
};

// Any codes, scales about 0.01.
Row random_row(TensorType type, unsigned seed) {
  std::mt19937 random(seed);
  const TensorTypeInfo& info = info_of(type);
  Row row;
  row.blocks.resize(size_bytes(type, kColumns));
  for (std::uint8_t& byte : row.blocks) {
    byte = static_cast<std::uint8_t>(random());
    if (type == TensorType::kQ8 && byte == 0x80) byte = 0x81;  // -128 is never written
  }
  for (std::size_t at = 0; at < row.blocks.size(); at += info.block_bytes) {
    std::uint8_t* block = row.blocks.data() + at;
    if (type == TensorType::kMxfp4) block[0] = static_cast<std::uint8_t>(118 + block[0] % 4);
    const bool last = type == TensorType::kQ6K;
    for (const std::size_t half : {last ? 208u : 0u, last ? 208u : 2u}) {
      const bool is_scale = half != 2 || type == TensorType::kQ4Min || type == TensorType::kQ5Min ||
                            type == TensorType::kQ4K || type == TensorType::kQ5K;
      if (type == TensorType::kMxfp4 || !is_scale) continue;
      block[half + 1] = static_cast<std::uint8_t>((block[half + 1] & 0x83) | 0x20);
    }
  }
  row.values.resize(kColumns);
  decode(type, row.blocks.data(), kColumns / info.block_elements, row.values.data());
  return row;
}

std::vector<float> rounded(TensorType type, const Row& row, const std::vector<double>& merged,
                           const FeedbackRows& feedback, std::vector<std::uint8_t>* out = nullptr) {
  std::vector<std::uint8_t> blocks(row.blocks.size());
  round_blocks(type, row.blocks, row.values, merged, feedback, blocks.data());
  std::vector<float> values(kColumns);
  decode(type, blocks.data(), kColumns / info_of(type).block_elements, values.data());
  if (out != nullptr) *out = blocks;
  return values;
}

const FeedbackRows kNone{kColumns, 0, {}, {}};

TEST(RoundBlocks, CodesAreThoseOfTheValues) {
  for (const TensorType type : kTypes) {
    for (unsigned seed = 0; seed < 8; ++seed) {
      const Row row = random_row(type, seed);
      const std::size_t count = kColumns / info_of(type).block_elements;
      const BlockGrid grid = block_grid(type, row.blocks.data(), count);
      ASSERT_EQ(grid.scale.size(), kColumns);
      std::vector<std::uint8_t> codes(kColumns), blocks = row.blocks;
      for (std::size_t i = 0; i < kColumns; ++i) {
        codes[i] = static_cast<std::uint8_t>((i * 7 + seed) % grid.codes);
      }
      set_codes(type, codes.data(), count, blocks.data());
      std::vector<float> values(kColumns);
      decode(type, blocks.data(), count, values.data());
      for (std::size_t i = 0; i < kColumns; ++i) {
        ASSERT_EQ(values[i], grid.value(i, codes[i])) << info_of(type).name << " " << i;
        ASSERT_EQ(grid.value(i, grid.nearest(i, values[i])), values[i]) << info_of(type).name;
        ASSERT_TRUE(grid.reaches(i, values[i])) << info_of(type).name << " " << i;
      }
    }
  }
}

TEST(RoundBlocks, NoCodeIsNearer) {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> anywhere(-2, 2);
  for (const TensorType type : kTypes) {
    const Row row = random_row(type, 9);
    const BlockGrid grid =
        block_grid(type, row.blocks.data(), kColumns / info_of(type).block_elements);
    for (std::size_t i = 0; i < kColumns; ++i) {
      const double x = anywhere(random);
      const double found = std::fabs(grid.value(i, grid.nearest(i, x)) - x);
      for (unsigned code = 0; code < grid.codes; ++code) {
        const double other = std::fabs(grid.value(i, static_cast<std::uint8_t>(code)) - x);
        ASSERT_LE(found, other * (1 + 1e-6)) << info_of(type).name << " " << x;
      }
    }
  }
}

TEST(RoundBlocks, AnUnchangedRowKeepsItsValues) {
  for (const TensorType type : kTypes) {
    const Row row = random_row(type, 3);
    const std::vector<double> merged(row.values.begin(), row.values.end());
    EXPECT_EQ(rounded(type, row, merged, kNone), row.values) << info_of(type).name;
  }
}

TEST(RoundBlocks, ABlockBeyondItsScalesGetsOthers) {
  for (const TensorType type : kTypes) {
    if (type == TensorType::kQ4Min || type == TensorType::kIQ4 || type == TensorType::kIQ4Xs) {
      continue;
    }
    const Row row = random_row(type, 4);
    std::vector<double> merged(row.values.begin(), row.values.end());
    const std::size_t block = info_of(type).block_elements;
    for (std::size_t i = block; i < 2 * block; ++i) merged[i] *= 8;
    std::vector<std::uint8_t> out;
    const std::vector<float> stored = rounded(type, row, merged, kNone, &out);
    double error = 0, whole = 0;
    for (std::size_t i = 0; i < kColumns; ++i) {
      error += std::pow(stored[i] - merged[i], 2);
      whole += std::pow(merged[i], 2);
      if (i / block != 1) {
        ASSERT_EQ(stored[i], row.values[i]) << info_of(type).name;
      }
    }
    EXPECT_LT(error, 0.03 * whole) << info_of(type).name;
  }
}

TEST(RoundBlocks, FeedbackKeepsWhatNearestLoses) {
  std::mt19937 random(2);
  std::normal_distribution<double> normal;
  std::vector<double> direction(kColumns), g(kColumns);
  for (double& x : direction) x = normal(random);
  for (std::size_t i = 0; i < kColumns; ++i) g[i] = direction[i] * std::sqrt(1000.0);
  const FeedbackRows feedback = feedback_rows(g, std::vector<double>(kColumns, 1), 1);
  for (const TensorType type : kTypes) {
    const Row row = random_row(type, 5);
    double size = 0;
    for (const float x : row.values) size += x * x;
    const double strength = 0.02 * std::sqrt(size / kColumns);
    std::vector<double> merged(row.values.begin(), row.values.end());
    for (std::size_t i = 0; i < kColumns; ++i) merged[i] += strength * direction[i];
    const auto kept = [&](const std::vector<float>& stored) {
      double along = 0, all = 0;
      for (std::size_t i = 0; i < kColumns; ++i) {
        along += (stored[i] - row.values[i]) * direction[i];
        all += direction[i] * direction[i];
      }
      return along / (strength * all);
    };
    EXPECT_NEAR(kept(rounded(type, row, merged, feedback)), 1, 0.1) << info_of(type).name;
    if (type != TensorType::kQ8 && type != TensorType::kQ6K) {
      EXPECT_LT(kept(rounded(type, row, merged, kNone)), 0.95) << info_of(type).name;
    }
  }
}

TEST(RoundBlocks, ARowHasTheSameCodesInAnyCompany) {
  std::mt19937 random(6);
  std::normal_distribution<double> normal(0, 0.1);
  std::vector<double> g(kColumns * 2);
  for (double& x : g) x = normal(random);
  const FeedbackRows feedback = feedback_rows(g, std::vector<double>(kColumns, 1), 2);
  constexpr std::size_t kRows = 37;  // two groups of lanes and a part of one
  for (const TensorType type : kTypes) {
    std::vector<double> wanted(kRows * kColumns);
    for (double& x : wanted) x = normal(random);
    std::vector<std::uint8_t> blocks;
    for (unsigned row = 0; row < kRows; ++row) {
      const Row one = random_row(type, row);
      blocks.insert(blocks.end(), one.blocks.begin(), one.blocks.end());
    }
    const std::size_t row_bytes = blocks.size() / kRows;
    for (const FeedbackRows& how : {feedback, kNone}) {
      std::vector<std::uint8_t> together = blocks, alone = blocks;
      set_rounded_codes(type, wanted, kRows, how, together.data());
      for (std::size_t row = 0; row < kRows; ++row) {
        set_rounded_codes(type, std::span(wanted).subspan(row * kColumns, kColumns), 1, how,
                          alone.data() + row * row_bytes);
      }
      EXPECT_EQ(together, alone) << info_of(type).name;
      EXPECT_NE(together, blocks) << info_of(type).name;
    }
  }
}

}  // namespace
}  // namespace monograph::gguf
