// Eight weights a vector, in registers from the packed bytes on.
#pragma once

#include <immintrin.h>

#include "monograph/kernels/linear/few_decode.h"
#include "monograph/simd/lanes_avx2.h"
#include "monograph/simd/transpose_avx2.h"

namespace monograph {

// For bf16 the even elements of a vector stand in its lower half, see below; otherwise in order.
template <bool kHalves>
struct FewOrder<simd::Avx2, kHalves> {
  using V = simd::Avx2;
  using L = Lanes<V>;

  static constexpr std::size_t kTerms = 1;
  [[gnu::always_inline]] static __m256 add_products(__m256 x, __m256 w, __m256 sum) {
    return L::fma(x, w, sum);
  }

  static constexpr std::size_t place(std::size_t element) {
    return kHalves ? element / 2 + element % 2 * 4 : element;
  }
  [[gnu::always_inline]] static __m256 to_places(__m256 x) {
    if constexpr (!kHalves) return x;
    return _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
  }
  [[gnu::always_inline]] static __m256 from_places(__m256 x) {
    if constexpr (!kHalves) return x;
    return _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  // As Avx2::to_bf16 and to_fp16.
  [[gnu::always_inline]] static __m256 rounded(__m256 x, DType dtype) {
    if constexpr (kHalves) {
      const __m256i u = _mm256_castps_si256(x);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
      const __m256i sum = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
      const __m256 upper = _mm256_castsi256_ps(_mm256_and_si256(sum, _mm256_set1_epi32(-65536)));
      const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
      return _mm256_blendv_ps(upper, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    } else {
      return dtype == DType::kFloat16 ? _mm256_cvtph_ps(V::to_fp16(x)) : x;
    }
  }
  [[gnu::always_inline]] static __m256 one_nan(__m256 x) {
    return _mm256_blendv_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)),
                            _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  }
  [[gnu::always_inline]] static void transpose(__m256 (&v)[8]) { transpose_8x8(v); }
  [[gnu::always_inline]] static __m256 e4m3(const std::uint8_t* p) {
    return V::e4m3_times(p, 1.0f);
  }
  // As e8m0_value().
  [[gnu::always_inline]] static __m256 e8m0(const std::uint8_t* p) {
    const __m256i bytes =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m256i zero = _mm256_cmpeq_epi32(bytes, _mm256_setzero_si256());
    const __m256i nan = _mm256_cmpeq_epi32(bytes, _mm256_set1_epi32(kE8m0NaN));
    const __m256i finite =
        _mm256_blendv_epi8(_mm256_slli_epi32(bytes, 23), _mm256_set1_epi32(0x00400000), zero);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(finite, _mm256_set1_epi32(0x7fc00000), nan));
  }
};
template <class T>
struct FewOrderOf<simd::Avx2, T> {
  using Type = FewOrder<simd::Avx2, std::is_same_v<T, Bf16>>;
};

// Four bits to bf16: thirty-two weights from sixteen bytes by two byte shuffles. High nibbles are
// looked up in one half, low ones in the other; bytes are put so that of the bf16 numbers the even
// words are elements 0-7 and the odd ones 8-15 of sixteen.
template <class F>
requires(F::kPerByte == 2 && kFewUnit<F> >= 32) struct FewDecoder<F, FewOrder<simd::Avx2, true>> {
  static constexpr std::size_t kTogether = 4;
  struct Prepared {
    __m256i low, high;  // bytes of the sixteen bf16 entries, in both halves
  };

  [[gnu::always_inline]] static void prepare(FewNumbers<F> numbers, DType dtype,
                                             const std::uint8_t*, Prepared& out) {
    static_cast<void>(dtype);  // bf16
    const auto [values, scale] = sixteen_values<F>(numbers);
    const auto table = simd::Avx2::scaled_table<Bf16>(values, scale);
    out = {_mm256_broadcastsi128_si256(table.low), _mm256_broadcastsi128_si256(table.high)};
  }
  [[gnu::always_inline]] static void decode(const Prepared& table, const std::uint8_t* p,
                                            __m256 (&w)[4]) {
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
    const __m256i bytes =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i shifts = F::kNibbles == Nibbles::kHighFirst
                               ? _mm256_setr_epi32(4, 4, 4, 4, 0, 0, 0, 0)
                               : _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
    const __m256i codes = _mm256_and_si256(
        _mm256_srlv_epi32(_mm256_shuffle_epi8(bytes, order), shifts), _mm256_set1_epi8(15));
    const __m256i low = _mm256_shuffle_epi8(table.low, codes);
    const __m256i high = _mm256_shuffle_epi8(table.high, codes);
    const __m256i a = _mm256_unpacklo_epi8(low, high), b = _mm256_unpackhi_epi8(low, high);
    const __m256i upper = _mm256_set1_epi32(-65536);
    w[0] = _mm256_castsi256_ps(_mm256_slli_epi32(a, 16));
    w[1] = _mm256_castsi256_ps(_mm256_and_si256(a, upper));
    w[2] = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
    w[3] = _mm256_castsi256_ps(_mm256_and_si256(b, upper));
  }
};

// Units of sixteen.
template <class F>
requires(F::kPerByte == 2 && kFewUnit<F> == 16) struct FewDecoder<F, FewOrder<simd::Avx2, true>> {
  static constexpr std::size_t kTogether = 2;
  using Prepared = simd::Avx2::HalfTable;

  [[gnu::always_inline]] static void prepare(float scale, DType dtype, const std::uint8_t*,
                                             Prepared& out) {
    static_cast<void>(dtype);  // bf16
    out = simd::Avx2::scaled_table<Bf16>(F::kValues, scale);
  }
  [[gnu::always_inline]] static void decode(const Prepared& table, const std::uint8_t* p,
                                            __m256 (&w)[2]) {
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 0, 4, 1, 5, 2, 6, 3, 7);
    const __m128i bytes =
        _mm_shuffle_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), order);
    const __m128i shifts = F::kNibbles == Nibbles::kHighFirst ? _mm_setr_epi32(4, 4, 0, 0)
                                                              : _mm_setr_epi32(0, 0, 4, 4);
    const __m128i codes = _mm_and_si128(_mm_srlv_epi32(bytes, shifts), _mm_set1_epi8(15));
    const __m128i low = _mm_shuffle_epi8(table.low, codes);
    const __m128i high = _mm_shuffle_epi8(table.high, codes);
    const __m256i both =
        _mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high));
    w[0] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    w[1] = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(-65536)));
  }
};

// Four bits to fp32 and fp16: a table of floats, in order.
template <class F>
requires(F::kPerByte == 2) struct FewDecoder<F, FewOrder<simd::Avx2, false>> {
  static constexpr std::size_t kTogether = 1;
  using Order = FewOrder<simd::Avx2, false>;
  using Prepared = simd::Avx2::FloatTable;

  [[gnu::always_inline]] static void prepare(FewNumbers<F> numbers, DType dtype,
                                             const std::uint8_t*, Prepared& out) {
    const auto [values, scale] = sixteen_values<F>(numbers);
    const auto table = simd::Avx2::scaled_table<float>(values, scale);
    out = {Order::rounded(table.low, dtype), Order::rounded(table.high, dtype)};
  }
  [[gnu::always_inline]] static void decode(const Prepared& table, const std::uint8_t* p,
                                            __m256 (&w)[1]) {
    w[0] = simd::Avx2::lookup<float, F::kNibbles>(table, p);
  }
};

// E4M3.
template <class F, bool kHalves>
requires(F::kPerByte == 1) struct FewDecoder<F, FewOrder<simd::Avx2, kHalves>> {
  static constexpr std::size_t kTogether = 1;
  using Order = FewOrder<simd::Avx2, kHalves>;
  struct Prepared {
    float scale;
    DType dtype;
  };

  [[gnu::always_inline]] static void prepare(float scale, DType dtype, const std::uint8_t*,
                                             Prepared& out) {
    out = {scale, dtype};
  }
  [[gnu::always_inline]] static void decode(const Prepared& unit, const std::uint8_t* p,
                                            __m256 (&w)[1]) {
    w[0] = Order::to_places(Order::rounded(simd::Avx2::e4m3_times(p, unit.scale), unit.dtype));
  }
};

}  // namespace monograph
