#pragma once

#include <arm_neon.h>

#include "monograph/simd/words.h"

namespace monograph {

template <>
struct Words<simd::Neon> {
  static constexpr std::size_t kLanes = 2;
  using Word = uint64x2_t;

  [[gnu::always_inline]] static Word set(std::uint64_t x) { return vdupq_n_u64(x); }
  [[gnu::always_inline]] static Word counted(std::uint64_t n) {
    return vcombine_u64(vcreate_u64(n), vcreate_u64(n + 1));
  }
  [[gnu::always_inline]] static Word upper(Word a) { return vshrq_n_u64(a, 32); }
  [[gnu::always_inline]] static Word mul(Word a, Word b) {
    return vmull_u32(vmovn_u64(a), vmovn_u64(b));
  }
  [[gnu::always_inline]] static Word exclusive_or(Word a, Word b) { return veorq_u64(a, b); }
  [[gnu::always_inline]] static void store_fours(std::uint32_t* p, const Word (&w)[4]) {
    // The lower words of two numbers, of lane 0 and then of lane 1.
    const Word a = pairs(w[0], w[1]), b = pairs(w[2], w[3]);
    vst1q_u32(p, vreinterpretq_u32_u64(vzip1q_u64(a, b)));
    vst1q_u32(p + 4, vreinterpretq_u32_u64(vzip2q_u64(a, b)));
  }

 private:
  [[gnu::always_inline]] static Word pairs(Word a, Word b) {
    return vreinterpretq_u64_u32(vtrn1q_u32(vreinterpretq_u32_u64(a), vreinterpretq_u32_u64(b)));
  }
};

}  // namespace monograph
