// Philox4x32-10 of core against torch's own engine, which takes the same key and counter: its seed
// is the key, its offset and subsequence are the halves of the counter. No library of torch is
// needed.
#include <ATen/core/PhiloxRNGEngine.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <random>

#include "monograph/kernels/seeded_dropout/philox.h"

namespace monograph {
namespace {

void expect_same(std::uint64_t key, std::uint64_t low, std::uint64_t high) {
  const PhiloxWords ours =
      philox({{static_cast<std::uint32_t>(low), static_cast<std::uint32_t>(low >> 32),
               static_cast<std::uint32_t>(high), static_cast<std::uint32_t>(high >> 32)}},
             key);
  at::Philox4_32 theirs(key, high, low);
  for (const std::uint32_t word : ours.word) EXPECT_EQ(word, theirs()) << key << low << high;
}

TEST(Philox, HasTheWordsOfTorchsEngine) {
  std::mt19937_64 random(1);
  constexpr std::uint64_t kOnes = ~std::uint64_t{0};
  expect_same(0, 0, 0);
  expect_same(kOnes, kOnes, kOnes);
  expect_same(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e);
  for (int i = 0; i < 1000; ++i) expect_same(random(), random(), random());
}

TEST(Philox, WordsOfAMaskAreThoseOfTheKeyAndThePosition) {
  const std::uint64_t seed = 0xfedcba9876543210, stream = 7;
  const std::uint64_t key = seed * 0x9E3779B97F4A7C15 + stream * 0xD1B54A32D192ED03;
  for (const std::uint64_t i : {std::uint64_t{0}, std::uint64_t{5}, std::uint64_t{1} << 32}) {
    at::Philox4_32 theirs(key, 0, i);
    for (const std::uint32_t word : mask_words(seed, stream, i).word) EXPECT_EQ(word, theirs());
  }
}

}  // namespace
}  // namespace monograph
