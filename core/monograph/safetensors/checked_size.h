// The only arithmetic allowed on sizes that come from a file: it reports overflow instead of
// wrapping. Every known hole in other readers was one product or sum that skipped this.
#pragma once

#include <cstdint>
#include <optional>

namespace monograph::safetensors {

constexpr std::optional<std::uint64_t> checked_add(std::uint64_t a, std::uint64_t b) {
  std::uint64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) return std::nullopt;
  return sum;
}

constexpr std::optional<std::uint64_t> checked_mul(std::uint64_t a, std::uint64_t b) {
  std::uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

}  // namespace monograph::safetensors
