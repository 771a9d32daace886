// Compiled with the flags of this instruction set and nothing else.
#include <immintrin.h>

#include "monograph/kernels/roofline/generic.h"
#include "monograph/simd/lanes_avx512.h"

namespace monograph {

template <>
void move_with<simd::Avx512>(const std::uint8_t* in, std::size_t in_bytes, std::uint8_t* out,
                             std::size_t out_bytes) {
  std::size_t o = 0;
  if (out_bytes < 4 * in_bytes) {  // twice as many bytes: half a vector becomes one
    for (std::size_t i = 0; i + 32 <= in_bytes && o + 64 <= out_bytes; i += 32, o += 64) {
      const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
      _mm512_storeu_si512(out + o, _mm512_broadcast_i64x4(half));
    }
    return;
  }
  const std::size_t pieces = in_bytes / 16;
  const std::size_t vectors = pieces == 0 ? 0 : out_bytes / 64 / pieces;
  for (std::size_t i = 0; i < pieces; ++i) {
    const __m512i piece =
        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + 16 * i)));
    for (std::size_t v = 0; v < vectors; ++v, o += 64) _mm512_storeu_si512(out + o, piece);
  }
}

template double vector_products_with<simd::Avx512>(std::size_t);

}  // namespace monograph
