// Sixteen weights a vector, in registers from the packed bytes on.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cstring>

#include "monograph/kernels/linear/few_decode.h"
#include "monograph/simd/lanes_avx512.h"
#include "monograph/simd/transpose_avx512.h"

namespace monograph {

// Eight bytes are broadcast: even lanes see the first four, odd lanes the other four, so lane 2i
// holds element i and lane 2i + 1 element 8 + i.
template <>
struct FewOrder<simd::Avx512> {
  using V = simd::Avx512;
  using L = Lanes<V>;

  static constexpr std::size_t kTerms = 1;
  [[gnu::always_inline]] static __m512 add_products(__m512 x, __m512 w, __m512 sum) {
    return L::fma(x, w, sum);
  }

  static constexpr std::size_t place(std::size_t element) {
    return element < 8 ? 2 * element : 2 * element - 15;
  }
  [[gnu::always_inline]] static __m512 to_places(__m512 x) {
    const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    return _mm512_permutexvar_ps(order, x);
  }
  [[gnu::always_inline]] static __m512 from_places(__m512 x) {
    const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    return _mm512_permutexvar_ps(order, x);
  }
  // As Avx512::to_bf16 and to_fp16.
  [[gnu::always_inline]] static __m512 rounded(__m512 x, DType dtype) {
    if (dtype == DType::kBFloat16) {
      const __m512i u = _mm512_castps_si512(x);
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
      const __m512i sum = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
      const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
      const __m512i upper = _mm512_and_si512(sum, _mm512_set1_epi32(-65536));
      return _mm512_castsi512_ps(_mm512_mask_mov_epi32(upper, nan, _mm512_set1_epi32(0x7fc00000)));
    }
    return dtype == DType::kFloat16 ? _mm512_cvtph_ps(V::to_fp16(x)) : x;
  }
  // The same to bf16 where a NaN has nothing in its low 16 bits, and so survives the rounding.
  [[gnu::always_inline]] static __m512 rounded_plain_nan(__m512 x) {
    const __m512i u = _mm512_castps_si512(x);
    const __mmask16 odd = _mm512_test_epi32_mask(u, _mm512_set1_epi32(1 << 16));
    const __m512i half = _mm512_add_epi32(u, _mm512_set1_epi32(0x7fff));
    const __m512i sum = _mm512_mask_add_epi32(half, odd, half, _mm512_set1_epi32(1));
    return _mm512_castsi512_ps(_mm512_and_si512(sum, _mm512_set1_epi32(-65536)));
  }
  [[gnu::always_inline]] static __m512 one_nan(__m512 x) {
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_mov_ps(x, nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
  }
  [[gnu::always_inline]] static void transpose(__m512 (&v)[16]) {
    __m512i words[16];
    unrolled<16>([&](auto i)
                     __attribute__((always_inline)) { words[i] = _mm512_castps_si512(v[i]); });
    transpose_16x16(words);
    unrolled<16>([&](auto i)
                     __attribute__((always_inline)) { v[i] = _mm512_castsi512_ps(words[i]); });
  }
  [[gnu::always_inline]] static __m512 e4m3(const std::uint8_t* p) {
    return V::e4m3_times(p, 1.0f);
  }
  // As e8m0_value().
  [[gnu::always_inline]] static __m512 e8m0(const std::uint8_t* p) {
    const __m512i bytes =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __mmask16 zero = _mm512_testn_epi32_mask(bytes, bytes);
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(bytes, _mm512_set1_epi32(kE8m0NaN));
    const __m512i finite =
        _mm512_mask_mov_epi32(_mm512_slli_epi32(bytes, 23), zero, _mm512_set1_epi32(0x00400000));
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(finite, nan, _mm512_set1_epi32(0x7fc00000)));
  }
};

template <class T>
struct FewOrderOf<simd::Avx512, T> {
  using Type = FewOrder<simd::Avx512>;
};

// Four bits: a table of sixteen floats, scaled and rounded once a unit.
template <class F>
requires(F::kPerByte == 2) struct FewDecoder<F, FewOrder<simd::Avx512>> {
  using Order = FewOrder<simd::Avx512>;
  static constexpr std::size_t kTogether = 1;
  using Prepared = __m512;

  // Products of E2M1 with a power of two have at most two bits: nothing to round to bf16.
  [[gnu::always_inline]] static void prepare(FewNumbers<F> numbers, DType dtype,
                                             const std::uint8_t*, Prepared& out) {
    const auto [values, scale] = sixteen_values<F>(numbers);
    const __m512 products = _mm512_mul_ps(_mm512_loadu_ps(values), _mm512_set1_ps(scale));
    if (F::kFormat == Format::kMxfp4 && dtype != DType::kFloat16)
      out = products;
    else if ((F::kFormat == Format::kNvfp4 || F::kFormat == Int4::kFormat) &&
             dtype == DType::kBFloat16)
      out = Order::rounded_plain_nan(products);  // the scale's: byte_scales(), group_scale()
    else
      out = Order::rounded(products, dtype);
  }
  // A permute reads four bits of an index: no mask.
  [[gnu::always_inline]] static void decode(const Prepared& table, const std::uint8_t* p,
                                            __m512 (&w)[1]) {
    std::int64_t eight;
    std::memcpy(&eight, p, 8);
    const __m512i shifts =
        F::kNibbles == Nibbles::kHighFirst
            ? _mm512_setr_epi32(4, 4, 0, 0, 12, 12, 8, 8, 20, 20, 16, 16, 28, 28, 24, 24)
            : _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28);
    w[0] = _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_set1_epi64(eight), shifts), table);
  }
};

// E4M3 times a power of two: a normal code's exponent is added to the scale's, and nothing is
// rounded. A unit with a zero, a subnormal or a NaN, or a scale outside, is decoded aside.
template <>
struct FewDecoder<Mxfp8, FewOrder<simd::Avx512>> {
  using Order = FewOrder<simd::Avx512>;
  static constexpr std::size_t kTogether = 1, kUnit = Mxfp8::kBlock;
  struct Prepared {
    __m512i scale;
    bool fast;
    const std::uint8_t* first;
    float aside[kUnit];
  };

  [[gnu::noinline]] static void decode_aside(const std::uint8_t* p, float scale, DType dtype,
                                             float* out) {
    for (std::size_t i = 0; i < kUnit; i += 16)
      _mm512_storeu_ps(
          out + i, Order::to_places(Order::rounded(simd::Avx512::e4m3_times(p + i, scale), dtype)));
  }
  [[gnu::always_inline]] static void prepare(float scale, DType dtype, const std::uint8_t* p,
                                             Prepared& out) {
    const std::int32_t bits = std::bit_cast<std::int32_t>(scale);
    // Exponents 1 to 15 of a code stay within those of normal numbers.
    out.fast =
        dtype != DType::kFloat16 && bits >= 7 << 23 && bits < 247 << 23 &&
        simd::Avx512::all_normal_e4m3(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    out.first = p;
    out.scale = _mm512_set1_epi32(bits - (7 << 23));
    if (!out.fast) [[unlikely]]
      decode_aside(p, scale, dtype, out.aside);
  }
  [[gnu::always_inline]] static void decode(const Prepared& unit, const std::uint8_t* p,
                                            __m512 (&w)[1]) {
    if (unit.fast) [[likely]] {
      const __m128i order = _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      const __m512i codes = _mm512_cvtepi8_epi32(_mm_shuffle_epi8(bytes, order));
      const __m512i placed = _mm512_and_si512(_mm512_slli_epi32(codes, 20),
                                              _mm512_set1_epi32(static_cast<int>(0x87f00000u)));
      w[0] = _mm512_castsi512_ps(_mm512_add_epi32(placed, unit.scale));
    } else {
      w[0] = _mm512_loadu_ps(unit.aside + (p - unit.first));
    }
  }
};

// E4M3. A normal code's product with the scale is (8 + mantissa) * scale * 2^(exponent - 10), which
// rounds alike for every exponent where it is a normal number of T: the low four bits of a code
// choose a product, the other exponent bits are added to it. A unit with a zero, a subnormal or a
// NaN, or a scale outside, is decoded aside.
template <class F>
requires(F::kPerByte == 1) struct FewDecoder<F, FewOrder<simd::Avx512>> {
  using Order = FewOrder<simd::Avx512>;
  static constexpr std::size_t kTogether = 1;
  static constexpr std::size_t kUnit = kFewUnit<F>;
  struct Prepared {
    __m512 products;
    bool fast;
    const std::uint8_t* first;
    float aside[kUnit];
  };

  [[gnu::noinline]] static void decode_aside(const std::uint8_t* p, float scale, DType dtype,
                                             float* out) {
    for (std::size_t i = 0; i < kUnit; i += 16)
      _mm512_storeu_ps(
          out + i, Order::to_places(Order::rounded(simd::Avx512::e4m3_times(p + i, scale), dtype)));
  }
  [[gnu::always_inline]] static bool all_normal(const std::uint8_t* p) {
    bool normal = true;
    if constexpr (kUnit >= 64) {
      for (std::size_t i = 0; i < kUnit; i += 64)
        normal = normal && simd::Avx512::all_normal_e4m3(_mm512_loadu_si512(p + i));
    } else {
      static_assert(kUnit == 32);
      normal =
          simd::Avx512::all_normal_e4m3(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    return normal;
  }
  [[gnu::always_inline]] static void prepare(float scale, DType dtype, const std::uint8_t* p,
                                             Prepared& out) {
    out.first = p;
    out.fast = dtype != DType::kFloat16 && simd::Avx512::is_fast_e4m3(scale) && all_normal(p);
    if (out.fast) [[likely]] {
      const __m512 mantissas =
          _mm512_setr_ps(8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15);
      const __m512i shifted = _mm512_setr_epi32(
          -10 << 23, -10 << 23, -10 << 23, -10 << 23, -10 << 23, -10 << 23, -10 << 23, -10 << 23,
          -9 << 23, -9 << 23, -9 << 23, -9 << 23, -9 << 23, -9 << 23, -9 << 23, -9 << 23);
      const __m512 products =
          Order::rounded(_mm512_mul_ps(mantissas, _mm512_set1_ps(scale)), dtype);
      out.products = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(products), shifted));
    } else {
      decode_aside(p, scale, dtype, out.aside);
    }
  }
  [[gnu::always_inline]] static void decode(const Prepared& unit, const std::uint8_t* p,
                                            __m512 (&w)[1]) {
    if (unit.fast) [[likely]] {
      const __m128i order = _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      const __m512i codes = _mm512_cvtepi8_epi32(_mm_shuffle_epi8(bytes, order));
      const __m512i upper = _mm512_and_si512(_mm512_slli_epi32(codes, 20),
                                             _mm512_set1_epi32(static_cast<int>(0x87000000u)));
      w[0] = _mm512_castsi512_ps(_mm512_add_epi32(
          _mm512_castps_si512(_mm512_permutexvar_ps(codes, unit.products)), upper));
    } else {
      w[0] = _mm512_loadu_ps(unit.aside + (p - unit.first));
    }
  }
};

}  // namespace monograph
