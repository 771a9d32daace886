// Parts of rows as vectors of eight floats in places.
#pragma once

#include "monograph/kernels/linear/few_decode_avx2.h"
#include "monograph/kernels/linear/placed_bytes_avx2.h"

namespace monograph {

template <bool kHalves>
struct PlacedParts<FewOrder<simd::Avx2, kHalves>> : PlacedBytesAvx2 {
  using Order = FewOrder<simd::Avx2, kHalves>;

  template <bool kBf16>
  [[gnu::always_inline]] static __m256 rounded(__m256 x, DType dtype) {
    static_assert(kBf16 == kHalves);
    if constexpr (kBf16) {
      const __m256i u = _mm256_castps_si256(x);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
      const __m256i sum = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
      return _mm256_castsi256_ps(_mm256_and_si256(sum, _mm256_set1_epi32(-65536)));
    }
    return dtype == DType::kFloat16 ? _mm256_cvtph_ps(simd::Avx2::to_fp16(x)) : x;
  }
  // Even elements of eight before odd ones.
  [[gnu::always_inline]] static __m128i order() {
    return kHalves ? _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)
                   : _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }

  template <bool kBf16>
  [[gnu::always_inline]] static void part(const PartWords& codes, Affine first, Affine second,
                                          DType dtype, float* out) {
    PartCodes ordered;
    _mm256_store_si256(reinterpret_cast<__m256i*>(ordered.bytes),
                       _mm256_shuffle_epi8(reinterpret_cast<__m256i>(codes),
                                           _mm256_broadcastsi128_si256(order())));
    unrolled<4>([&](auto i) __attribute__((always_inline)) {
      const Affine affine = i < 2 ? first : second;
      const __m128i eight =
          _mm_loadl_epi64(reinterpret_cast<const __m128i*>(ordered.bytes + i * 8));
      const __m256 x =
          _mm256_fmsub_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight)),
                          _mm256_set1_ps(affine.scale), _mm256_set1_ps(affine.minimum));
      _mm256_storeu_ps(out + i * 8, rounded<kBf16>(x, dtype));
    });
  }

  template <bool kBf16>
  [[gnu::always_inline]] static void bytes(const std::uint8_t* p, std::uint8_t flip, int zero,
                                           float scale, DType dtype, float* out) {
    const __m128i signed_bytes = _mm_xor_si128(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)),
                                               _mm_set1_epi8(static_cast<char>(flip)));
    const __m256i differences = _mm256_sub_epi32(
        _mm256_cvtepi8_epi32(_mm_shuffle_epi8(signed_bytes, order())), _mm256_set1_epi32(zero));
    _mm256_storeu_ps(
        out, rounded<kBf16>(_mm256_mul_ps(_mm256_cvtepi32_ps(differences), _mm256_set1_ps(scale)),
                            dtype));
  }
};

}  // namespace monograph
