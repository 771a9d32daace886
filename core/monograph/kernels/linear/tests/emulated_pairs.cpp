// Compiled with the flags of AVX-512.
#include "monograph/kernels/linear/tests/emulated_pairs.h"

#include "monograph/kernels/linear/bf16_pairs.h"

namespace monograph {
namespace {

struct EmulatedPairs : simd::Avx512 {
  [[gnu::always_inline]] static __m512 flushed(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __mmask16 small = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
    const __m512i sign = _mm512_set1_epi32(static_cast<int>(0x80000000u));
    return _mm512_castsi512_ps(_mm512_mask_and_epi32(bits, small, bits, sign));
  }
  [[gnu::always_inline]] static __m512 upper(__m512 x) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(-65536)));
  }
  [[gnu::always_inline]] static __m512 lower(__m512 x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 16));
  }
  [[gnu::always_inline]] static __m512 add_pairs(__m512 x, __m512 w, __m512 sum) {
    sum = flushed(_mm512_fmadd_ps(flushed(upper(x)), flushed(upper(w)), flushed(sum)));
    return flushed(_mm512_fmadd_ps(flushed(lower(x)), flushed(lower(w)), sum));
  }
};

}  // namespace

const LinearKernels& emulated_pairs(Pass pass) {
  return *find_pairs<EmulatedPairs>(DType::kBFloat16, pass);
}

}  // namespace monograph
