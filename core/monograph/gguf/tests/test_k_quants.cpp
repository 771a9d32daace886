#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <vector>

#include "monograph/gguf/blocks.h"
#include "monograph/gguf/decode_blocks.h"
#include "monograph/gguf/mixture.h"

namespace monograph::gguf {
namespace {

struct Case {
  TensorType type;
  void (*encode)(const float*, std::size_t, std::uint8_t*);
  std::size_t part;
  int codes;
  float largest;
};
constexpr std::array kCases = {Case{TensorType::kQ4K, encode_q4_k, 32, 16, kLargestWithMinimum},
                               Case{TensorType::kQ5K, encode_q5_k, 32, 32, kLargestWithMinimum},
                               Case{TensorType::kQ6K, encode_q6_k, 16, 64, kLargestQ6K}};

std::vector<float> round_trip(const Case& one, const std::vector<float>& values) {
  const std::size_t blocks = values.size() / kSuperblock;
  std::vector<std::uint8_t> bytes(blocks * info_of(one.type).block_bytes, 0xa5);
  one.encode(values.data(), blocks, bytes.data());
  std::vector<float> out(values.size());
  decode(one.type, bytes.data(), blocks, out.data());
  return out;
}

double squared_error(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double off = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    sum += off * off;
  }
  return sum;
}

// Each part rounded between its smallest and largest element, with scales that nothing rounds; in
// Q6_K between minus and plus its largest magnitude.
double plain_error(const Case& one, const std::vector<float>& values) {
  double sum = 0;
  for (std::size_t begin = 0; begin < values.size(); begin += one.part) {
    double low = 0, high = 0;
    for (std::size_t i = begin; i < begin + one.part; ++i) {
      low = std::min(low, static_cast<double>(values[i]));
      high = std::max(high, static_cast<double>(values[i]));
    }
    if (one.type == TensorType::kQ6K) {
      high = std::max(-low, high);
      low = -high;
    }
    const double step = (high - low) / (one.codes - 1);
    for (std::size_t i = begin; i < begin + one.part && step > 0; ++i) {
      const double x = static_cast<double>(values[i]);
      const double off = low + std::round((x - low) / step) * step - x;
      sum += off * off;
    }
  }
  return sum;
}

template <class Draw>
std::vector<float> drawn(Draw draw) {
  std::mt19937 random(5);
  std::vector<float> values(64 * kSuperblock);
  for (float& value : values) value = static_cast<float>(draw(random));
  return values;
}

TEST(KQuants, ErrorIsBelowThatOfPlainRoundingWithExactScales) {
  std::normal_distribution<double> normal;
  std::student_t_distribution<double> tails(3);
  const std::vector<float> cases[] = {
      drawn([&](auto& random) { return 0.02 * normal(random); }),
      drawn([&](auto& random) { return tails(random); }),
      drawn([&](auto& random) { return std::fabs(normal(random)); }),
      drawn([&](auto& random) { return -std::fabs(normal(random)); }),
      drawn([&](auto& random) { return 1e-4 * normal(random); }),
      drawn([&](auto& random) { return 1e5 * normal(random); }),
  };
  for (const Case& one : kCases) {
    for (const auto& values : cases) {
      EXPECT_LT(squared_error(values, round_trip(one, values)), plain_error(one, values))
          << info_of(one.type).name << " " << values[0];
    }
  }
}

TEST(KQuants, WhatABlockHoldsExactlyComesBackExactly) {
  for (const Case& one : kCases) {
    // Every code of every part, with scale and minimum 1 times 63 or 127 units.
    const float unit = one.type == TensorType::kQ6K ? 127 : 63;
    std::vector<float> values(kSuperblock);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const int code = static_cast<int>(i * 7) % one.codes;
      const int shift = one.type == TensorType::kQ6K ? 32 : 1;
      values[i] = static_cast<float>(code - shift) * unit;
    }
    if (one.type == TensorType::kQ6K) {  // a part has 16 of the 64 codes: the extreme one in each
      for (std::size_t i = 0; i < values.size(); i += one.part) values[i] = -32 * unit;
    }
    const std::vector<float> out = round_trip(one, values);
    EXPECT_EQ(squared_error(values, out), 0) << info_of(one.type).name;
  }
}

TEST(KQuants, ZeroTinyConstantAndLargestBlocksAreFinite) {
  for (const Case& one : kCases) {
    for (const float value :
         {0.0f, -0.0f, 1e-44f, -1e-30f, 1e-8f, 0.3f, -0.3f, 1.0f, one.largest, -one.largest}) {
      std::vector<float> values(kSuperblock, value);
      std::vector<float> out = round_trip(one, values);
      const float bound = std::max(std::fabs(value) / 500, 6e-8f * 64);
      for (const float got : out) {
        ASSERT_TRUE(std::isfinite(got)) << info_of(one.type).name << " " << value;
        ASSERT_LE(std::fabs(got - value), bound) << info_of(one.type).name << " " << value;
      }
      for (std::size_t i = 0; i < values.size(); i += 3) values[i] = -value;
      out = round_trip(one, values);
      const double steps = one.codes - 1;
      for (std::size_t i = 0; i < values.size(); ++i) {
        ASSERT_TRUE(std::isfinite(out[i])) << info_of(one.type).name << " " << value;
        // At most a step of the range, and the six bits' part of it.
        ASSERT_LE(
            std::fabs(static_cast<double>(out[i]) - static_cast<double>(values[i])),
            std::max(2 * std::fabs(static_cast<double>(value)) * (1 / steps + 1.0 / 63), 4e-6))
            << info_of(one.type).name << " " << value;
      }
    }
  }
}

TEST(KQuants, ABlockDoesNotSeeItsNeighbours) {
  std::normal_distribution<double> normal;
  const std::vector<float> values = drawn([&](auto& random) { return normal(random); });
  for (const Case& one : kCases) {
    const std::vector<float> whole = round_trip(one, values);
    const std::vector<float> last(values.end() - kSuperblock, values.end());
    const std::vector<float> alone = round_trip(one, last);
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), whole.end() - kSuperblock));
  }
}

ModelConfig config_of(std::uint64_t layers, std::uint64_t kv_heads, bool tied) {
  ModelConfig config;
  config.layers = layers;
  config.heads = 8;
  config.kv_heads = kv_heads;
  config.tied = tied;
  return config;
}

TEST(Mixture, LayersWithMoreBits) {
  const ModelConfig config = config_of(16, 8, false);
  std::vector<int> more;
  for (int layer = 0; layer < 16; ++layer) {
    const std::string name = "blk." + std::to_string(layer) + ".ffn_down.weight";
    if (mixed_type(config, TensorType::kQ4K, name, 512) == TensorType::kQ6K) more.push_back(layer);
  }
  EXPECT_EQ(more, (std::vector<int>{0, 1, 4, 7, 10, 13, 14, 15}));
}

TEST(Mixture, OtherMatricesAndShortRows) {
  using enum TensorType;
  const ModelConfig config = config_of(80, 2, false), tied = config_of(80, 8, true);
  EXPECT_EQ(mixed_type(config, kQ4K, "blk.11.attn_v.weight", 256), kQ5K);
  EXPECT_EQ(mixed_type(config, kQ5K, "blk.11.attn_v.weight", 256), kQ5K);
  EXPECT_EQ(mixed_type(config, kQ4K, "blk.12.attn_v.weight", 256), kQ6K);
  EXPECT_EQ(mixed_type(tied, kQ4K, "blk.11.attn_v.weight", 256), kQ4K);
  EXPECT_EQ(mixed_type(config, kQ4K, "output.weight", 256), kQ6K);
  EXPECT_EQ(mixed_type(config, kQ4K, "token_embd.weight", 256), kQ4K);
  EXPECT_EQ(mixed_type(tied, kQ4K, "token_embd.weight", 256), kQ6K);
  EXPECT_EQ(mixed_type(config, kQ4K, "blk.3.attn_q.weight", 288), kQ5);
  EXPECT_EQ(mixed_type(config, kQ5K, "blk.3.attn_q.weight", 288), kQ5Min);
  EXPECT_EQ(mixed_type(config, kQ6K, "blk.3.attn_q.weight", 288), kQ8);
  EXPECT_EQ(mixed_type(config, kQ4K, "output.weight", 288), kQ8);
  EXPECT_EQ(mixed_type(config, kQ4K, "blk.3.attn_q.weight", 40), kF16);
}

TEST(Mixture, ExpertsAndWhatTheyShare) {
  using enum TensorType;
  ModelConfig eight = config_of(16, 2, false), many = eight;
  eight.experts = 8;
  many.experts = 128;
  for (const TensorType type : {kQ4K, kQ5K, kQ6K}) {
    EXPECT_EQ(mixed_type(eight, type, "blk.2.attn_v.weight", 512), kQ8);
    EXPECT_EQ(mixed_type(eight, type, "blk.0.attn_k.weight", 512), kQ8);
    EXPECT_EQ(mixed_type(many, type, "blk.2.attn_k.weight", 512), type);
    EXPECT_EQ(mixed_type(many, type, "blk.2.attn_output.weight", 512), type);
    for (const ModelConfig& config : {eight, many}) {
      EXPECT_EQ(mixed_type(config, type, "blk.0.ffn_down_exps.weight", 512), kQ6K);
      EXPECT_EQ(mixed_type(config, type, "blk.2.ffn_down_exps.weight", 512), type);
      EXPECT_EQ(mixed_type(config, type, "blk.0.ffn_up_exps.weight", 512), type);
      EXPECT_EQ(mixed_type(config, type, "blk.0.ffn_gate_inp.weight", 512), kF32);
    }
  }
  EXPECT_EQ(mixed_type(eight, kQ4K, "blk.2.attn_output.weight", 512), kQ5K);
  EXPECT_EQ(mixed_type(eight, kQ5K, "blk.2.attn_output.weight", 512), kQ5K);
  EXPECT_EQ(mixed_type(eight, kQ6K, "blk.2.attn_output.weight", 512), kQ6K);
  EXPECT_EQ(mixed_type(many, kQ4K, "blk.0.ffn_down_exps.weight", 288), kQ8);
}

}  // namespace
}  // namespace monograph::gguf
