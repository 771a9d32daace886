// Every type from random bytes against the formula in double precision, element by element, written
// from the layouts of decode_blocks.h without its code. The sum of a product and a minimum is
// rounded once, so equal means equal bits.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "monograph/gguf/blocks.h"
#include "monograph/gguf/decode_blocks.h"

namespace monograph::gguf {
namespace {

using Bytes = std::vector<std::uint8_t>;

// fp16 by its definition.
double half(const std::uint8_t* p) {
  const unsigned bits = p[0] | p[1] << 8;
  const int exponent = bits >> 10 & 31;
  const double fraction = bits & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return bits >> 15 ? -magnitude : magnitude;
}

constexpr int kTable[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                            1,    13,   25,  38,  53,  69,  89,  113};

unsigned nibble(const std::uint8_t* codes, std::size_t i) {
  return i < 16 ? codes[i] % 16 : codes[i - 16] / 16;
}

unsigned bit(const std::uint8_t* bits, std::size_t i) { return bits[i / 8] >> i % 8 & 1; }

double e2m1(unsigned code) {
  constexpr double kValues[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return code >= 8 ? -kValues[code - 8] : kValues[code];
}

// Scale or minimum `part` of the twelve bytes as one little-endian number of six-bit fields would
// have it, from llama.cpp's layout: bytes 0-3 scales, 4-7 minima, 8-11 low halves, tops above.
unsigned six(const std::uint8_t* p, std::size_t part, bool minimum) {
  if (part < 4) return p[part + (minimum ? 4 : 0)] % 64;
  const unsigned low = minimum ? p[part + 4] / 16 : p[part + 4] % 16;
  return low + 16 * (p[part - (minimum ? 0 : 4)] / 64);
}

double wanted(TensorType type, const std::uint8_t* b, std::size_t i) {
  switch (type) {
    case TensorType::kQ4:
      return half(b) * (static_cast<int>(nibble(b + 2, i)) - 8);
    case TensorType::kQ4Min:
      return half(b) * nibble(b + 4, i) + half(b + 2);
    case TensorType::kQ5:
      return half(b) * (static_cast<int>(nibble(b + 6, i) + 16 * bit(b + 2, i)) - 16);
    case TensorType::kQ5Min:
      return half(b) * (nibble(b + 8, i) + 16 * bit(b + 4, i)) + half(b + 2);
    case TensorType::kQ8:
      return half(b) * static_cast<std::int8_t>(b[2 + i]);
    case TensorType::kIQ4:
      return half(b) * kTable[nibble(b + 2, i)];
    case TensorType::kMxfp4:
      return std::ldexp(e2m1(nibble(b + 1, i)), b[0] - 127);
    case TensorType::kQ4K:
    case TensorType::kQ5K: {
      const std::size_t part = i / 32, inside = i % 32;
      const bool five = type == TensorType::kQ5K;
      const std::uint8_t byte = b[(five ? 48 : 16) + part / 2 * 32 + inside];
      unsigned code = part % 2 ? byte / 16 : byte % 16;
      if (five) code += 16 * (b[16 + inside] >> part & 1);
      return half(b) * six(b + 4, part, false) * code - half(b + 2) * six(b + 4, part, true);
    }
    case TensorType::kQ6K: {
      const std::size_t inside = i % 128, quarter = inside / 32;
      const std::uint8_t byte = b[i / 128 * 64 + inside % 64];
      const unsigned low = quarter / 2 ? byte / 16 : byte % 16;
      const unsigned high = b[128 + i / 128 * 32 + inside % 32] >> 2 * quarter & 3;
      const int scale = static_cast<std::int8_t>(b[192 + i / 16]);
      return half(b + 208) * scale * (static_cast<int>(low + 16 * high) - 32);
    }
    case TensorType::kIQ4Xs: {
      const std::size_t part = i / 32;
      const unsigned low = part % 2 ? b[4 + part / 2] / 16 : b[4 + part / 2] % 16;
      const unsigned high = (b[2] | b[3] << 8) >> 2 * part & 3;
      return half(b) * (static_cast<int>(low + 16 * high) - 32) *
             kTable[nibble(b + 8 + part * 16, i % 32)];
    }
    default:
      return NAN;
  }
}

// Places of fp16 numbers in a block, which random bytes must not make infinite.
std::vector<std::size_t> halves(TensorType type) {
  switch (type) {
    case TensorType::kQ4Min:
    case TensorType::kQ5Min:
    case TensorType::kQ4K:
    case TensorType::kQ5K:
      return {0, 2};
    case TensorType::kQ6K:
      return {208};
    case TensorType::kMxfp4:
      return {};
    default:
      return {0};
  }
}

TEST(GgufDecode, EveryTypeIsItsFormulaRoundedOnce) {
  std::mt19937 random(1);
  for (const TensorTypeInfo& type : kTensorTypes) {
    if (type.block_elements == 1) continue;
    constexpr std::size_t kBlocks = 2000;
    Bytes bytes(1 + kBlocks * type.block_bytes);  // from an odd address on
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
    std::uint8_t* blocks = bytes.data() + 1;
    for (std::size_t i = 0; i < kBlocks; ++i) {
      std::uint8_t* block = blocks + i * type.block_bytes;
      for (const std::size_t place : halves(type.type)) {
        if ((block[place + 1] & 0x7c) == 0x7c) block[place + 1] &= 0xfb;
      }
      if (type.type == TensorType::kMxfp4 && block[0] > 250) block[0] = 250;
    }
    std::vector<float> out(kBlocks * type.block_elements);
    decode(type.type, blocks, kBlocks, out.data());
    std::size_t differ = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
      const std::uint8_t* block = blocks + i / type.block_elements * type.block_bytes;
      const auto exact = static_cast<float>(wanted(type.type, block, i % type.block_elements));
      differ += exact != out[i];
    }
    EXPECT_EQ(differ, 0u) << type.name;
  }
}

TEST(GgufDecode, WhatWasEncodedComesBack) {
  std::vector<float> values(320);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(static_cast<int>(i % 255) - 127) / 64;
  }
  Bytes bytes(10 * 34);
  encode_q8_0(values.data(), 10, bytes.data());
  std::vector<float> out(320);
  decode(TensorType::kQ8, bytes.data(), 10, out.data());
  for (std::size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(out[i], values[i], 2.0 / 127 / 2);
  const float plain[] = {1.5f, -0.0f, INFINITY};
  decode(TensorType::kF32, reinterpret_cast<const std::uint8_t*>(plain), 3, out.data());
  EXPECT_EQ(std::memcmp(plain, out.data(), sizeof plain), 0);
}

}  // namespace
}  // namespace monograph::gguf
