// Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3"
// (2011): four random words that follow from a counter and a key alone, on any device.
#pragma once

#include <cstdint>

namespace monograph {

struct PhiloxWords {
  std::uint32_t word[4];
};

[[gnu::always_inline]] constexpr PhiloxWords philox(PhiloxWords counter, std::uint64_t key) {
  std::uint32_t low = static_cast<std::uint32_t>(key);
  std::uint32_t high = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t first = std::uint64_t{0xD2511F53} * counter.word[0];
    const std::uint64_t second = std::uint64_t{0xCD9E8D57} * counter.word[2];
    counter = {{static_cast<std::uint32_t>(second >> 32) ^ counter.word[1] ^ low,
                static_cast<std::uint32_t>(second),
                static_cast<std::uint32_t>(first >> 32) ^ counter.word[3] ^ high,
                static_cast<std::uint32_t>(first)}};
    low += 0x9E3779B9;
    high += 0xBB67AE85;
  }
  return counter;
}

[[gnu::always_inline]] constexpr std::uint64_t mask_key(std::uint64_t seed, std::uint64_t stream) {
  return seed * 0x9E3779B97F4A7C15 + stream * 0xD1B54A32D192ED03;
}

// The words of elements 4 i to 4 i + 3 of a mask.
[[gnu::always_inline]] constexpr PhiloxWords mask_words(std::uint64_t seed, std::uint64_t stream,
                                                        std::uint64_t i) {
  const PhiloxWords counter = {
      {static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(i >> 32), 0, 0}};
  return philox(counter, mask_key(seed, stream));
}

// An element is kept if its word is below this: (1 - probability) 2^32, rounded to the nearest.
constexpr std::uint64_t keep_below(double probability) {
  return static_cast<std::uint64_t>((1.0 - probability) * 0x1p32 + 0.5);
}

}  // namespace monograph
