#pragma once

#include <immintrin.h>

#include "monograph/simd/words.h"

namespace monograph {

template <>
struct Words<simd::Avx512> {
  static constexpr std::size_t kLanes = 8;
  using Word = __m512i;

  [[gnu::always_inline]] static Word set(std::uint64_t x) {
    return _mm512_set1_epi64(static_cast<long long>(x));
  }
  [[gnu::always_inline]] static Word counted(std::uint64_t n) {
    return _mm512_add_epi64(set(n), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
  }
  [[gnu::always_inline]] static Word upper(Word a) { return _mm512_srli_epi64(a, 32); }
  [[gnu::always_inline]] static Word mul(Word a, Word b) { return _mm512_mul_epu32(a, b); }
  [[gnu::always_inline]] static Word exclusive_or(Word a, Word b) { return _mm512_xor_si512(a, b); }
  [[gnu::always_inline]] static void store_fours(std::uint32_t* p, const Word (&w)[4]) {
    // Two numbers in each lane, then the pairs of a lane behind each other.
    const Word a = _mm512_mask_mov_epi32(w[0], 0xaaaa, _mm512_slli_epi64(w[1], 32));
    const Word b = _mm512_mask_mov_epi32(w[2], 0xaaaa, _mm512_slli_epi64(w[3], 32));
    const Word first = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    const Word second = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
    _mm512_storeu_si512(p, _mm512_permutex2var_epi64(a, first, b));
    _mm512_storeu_si512(p + 16, _mm512_permutex2var_epi64(a, second, b));
  }
};

}  // namespace monograph
