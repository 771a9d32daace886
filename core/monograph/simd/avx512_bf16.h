// The vocabulary of AVX-512 with its product of bf16 pairs (Cooper Lake, Zen 4).
#pragma once

#include <immintrin.h>

#include "monograph/cpu/pair_tags.h"
#include "monograph/simd/avx512.h"

namespace monograph::simd {

struct Avx512Bf16 : Avx512 {
  // Words of two bf16 numbers. In each lane sum + x[1] * w[1], rounded, then + x[0] * w[0], rounded
  // again: to nearest even, with subnormal numbers as zeros, operands and sums alike, whatever
  // MXCSR says.
  [[gnu::always_inline]] static __m512 add_pairs(__m512 x, __m512 w, __m512 sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(w));
  }
};

}  // namespace monograph::simd
