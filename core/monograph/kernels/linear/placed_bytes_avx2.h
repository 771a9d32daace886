// What AVX2 and AVX-512 do alike with the bytes of ggml's blocks.
#pragma once

#include <immintrin.h>

#include "monograph/kernels/linear/placed_rows.h"

namespace monograph {

struct PlacedBytesAvx2 {
  // Eight bytes, or eight signed ones, times a number.
  [[gnu::always_inline]] static void eight_times(std::uint64_t bytes, float d, float* out) {
    const __m256i numbers =
        _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<std::int64_t>(bytes)));
    _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_cvtepi32_ps(numbers), _mm256_set1_ps(d)));
  }
  [[gnu::always_inline]] static void eight_signed_times(const std::uint8_t* bytes, float d,
                                                        float* out) {
    const __m256i numbers =
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
    _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_cvtepi32_ps(numbers), _mm256_set1_ps(d)));
  }
  [[gnu::always_inline]] static void look_up(const std::uint8_t (&bytes)[16], PartWords& codes) {
    const __m256i table =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    codes =
        reinterpret_cast<PartWords>(_mm256_shuffle_epi8(table, reinterpret_cast<__m256i>(codes)));
  }
};

}  // namespace monograph
