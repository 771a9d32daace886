// A set of small integers that finds its least member at or above a value in one step per level: a
// bitmap, over it a bitmap of the words that are not zero, and so on. 4096 spaces need 2 levels, a
// binary segment tree 12.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace monograph {

class SpaceSet {
 public:
  // Members are 1 to `largest`.
  explicit SpaceSet(std::uint32_t largest) {
    std::size_t bits = std::size_t{largest} + 1;
    do {
      bits = (bits + 63) / 64;
      levels_.emplace_back(bits);
    } while (bits > 1);
  }

  void insert(std::uint32_t value) {
    for (auto& level : levels_) {
      level[value / 64] |= std::uint64_t{1} << (value % 64);
      value /= 64;
    }
  }

  void erase(std::uint32_t value) {
    for (auto& level : levels_) {
      level[value / 64] &= ~(std::uint64_t{1} << (value % 64));
      if (level[value / 64] != 0) return;
      value /= 64;
    }
  }

  // The least member >= value, or 0.
  std::uint32_t at_least(std::uint32_t value) const {
    for (std::size_t up = 0; up < levels_.size(); ++up) {
      if (value / 64 >= levels_[up].size()) return 0;
      const std::uint64_t rest = levels_[up][value / 64] >> (value % 64);
      if (rest != 0) return first_below(up, value + std::countr_zero(rest));
      value = value / 64 + 1;
    }
    return 0;
  }

 private:
  // The least member under bit `value` of level `up`.
  std::uint32_t first_below(std::size_t up, std::uint32_t value) const {
    while (up > 0) {
      --up;
      value = value * 64 + std::countr_zero(levels_[up][value]);
    }
    return value;
  }

  std::vector<std::vector<std::uint64_t>> levels_;
};

}  // namespace monograph
