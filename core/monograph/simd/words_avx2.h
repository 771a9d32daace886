#pragma once

#include <immintrin.h>

#include "monograph/simd/words.h"

namespace monograph {

template <>
struct Words<simd::Avx2> {
  static constexpr std::size_t kLanes = 4;
  using Word = __m256i;

  [[gnu::always_inline]] static Word set(std::uint64_t x) {
    return _mm256_set1_epi64x(static_cast<long long>(x));
  }
  [[gnu::always_inline]] static Word counted(std::uint64_t n) {
    return _mm256_add_epi64(set(n), _mm256_setr_epi64x(0, 1, 2, 3));
  }
  [[gnu::always_inline]] static Word upper(Word a) { return _mm256_srli_epi64(a, 32); }
  [[gnu::always_inline]] static Word mul(Word a, Word b) { return _mm256_mul_epu32(a, b); }
  [[gnu::always_inline]] static Word exclusive_or(Word a, Word b) { return _mm256_xor_si256(a, b); }
  [[gnu::always_inline]] static void store_fours(std::uint32_t* p, const Word (&w)[4]) {
    // Two numbers in each lane, then the pairs of a lane behind each other.
    const Word a = _mm256_blend_epi32(w[0], _mm256_slli_epi64(w[1], 32), 0xaa);
    const Word b = _mm256_blend_epi32(w[2], _mm256_slli_epi64(w[3], 32), 0xaa);
    const Word even = _mm256_unpacklo_epi64(a, b), odd = _mm256_unpackhi_epi64(a, b);
    auto* const out = reinterpret_cast<__m256i*>(p);
    _mm256_storeu_si256(out, _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(even, odd, 0x31));
  }
};

}  // namespace monograph
