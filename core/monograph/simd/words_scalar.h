#pragma once

#include "monograph/simd/words.h"

namespace monograph {

template <>
struct Words<simd::Scalar> {
  static constexpr std::size_t kLanes = 1;
  using Word = std::uint64_t;

  [[gnu::always_inline]] static Word set(std::uint64_t x) { return x; }
  [[gnu::always_inline]] static Word counted(std::uint64_t n) { return n; }
  [[gnu::always_inline]] static Word upper(Word a) { return a >> 32; }
  [[gnu::always_inline]] static Word mul(Word a, Word b) {
    return std::uint64_t{static_cast<std::uint32_t>(a)} * static_cast<std::uint32_t>(b);
  }
  [[gnu::always_inline]] static Word exclusive_or(Word a, Word b) { return a ^ b; }
  [[gnu::always_inline]] static void store_fours(std::uint32_t* p, const Word (&w)[4]) {
    for (std::size_t k = 0; k < 4; ++k) p[k] = static_cast<std::uint32_t>(w[k]);
  }
};

}  // namespace monograph
