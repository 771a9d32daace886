// Sixteen blocks of bf16 to E2M1 or E4M3 (MXFP4, NVFP4, MXFP8). Two elements of bf16 are one 32-bit
// lane: the even one and the odd one are scaled in vectors of their own, and what the rounding
// needs of both is put back into one, half as wide.
#pragma once

#include <immintrin.h>

#include <bit>
#include <type_traits>

#include "monograph/formats/scaling.h"
#include "monograph/kernels/quantize/quantize.h"
#include "monograph/kernels/quantize/strip.h"
#include "monograph/simd/lanes_avx512.h"

namespace monograph {

// Lanes, and what a rule for E4M3 scales needs besides.
struct ScaleLanes : Lanes<simd::Avx512> {
  // For 0 <= x <= 448: the nearest E4M3, ties to even.
  [[gnu::always_inline]] static F32 e4m3(F32 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7ffff)), odd);
    const __m512i normal = _mm512_and_si512(up, _mm512_set1_epi32(static_cast<int>(0xfff00000u)));
    const F32 aligned = set(E4m3::kAligned);
    const __mmask16 below = _mm512_cmp_ps_mask(x, set(E4m3::kSmallestNormal), _CMP_LT_OQ);
    return _mm512_mask_sub_ps(_mm512_castsi512_ps(normal), below, add(x, aligned), aligned);
  }
  // b where a is zero.
  [[gnu::always_inline]] static F32 filled(F32 a, F32 b) {
    return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(a, set(0.0f), _CMP_EQ_OQ), b);
  }
};

// What the elements are multiplied with or divided by, one entry per block.
struct StripScaling {
  __m512 factors, inverses;
  bool divide, inverted;  // inverted: a division may be made of the inverses (base/scaling.h)
  float zero;
};

[[gnu::always_inline]] inline StripScaling strip_scaling(__m512 factors, const Scaling& rule) {
  StripScaling s = {factors, factors, rule.divide, false, rule.zero};
  if (!rule.divide) return s;
  const __m512i mantissa = _mm512_set1_epi32(0x7fffff);
  const __m512i bits = _mm512_castps_si512(factors);
  const __mmask16 usable = _mm512_cmp_ps_mask(factors, _mm512_set1_ps(0x1p-60f), _CMP_GE_OQ) &
                           _mm512_cmp_ps_mask(factors, _mm512_set1_ps(0x1p60f), _CMP_LE_OQ) &
                           _mm512_cmpneq_epi32_mask(_mm512_and_si512(bits, mantissa), mantissa);
  s.inverted = usable == 0xffff;
  s.inverses = _mm512_div_ps(_mm512_set1_ps(1.0f), factors);
  return s;
}

// Thirty-two elements to codes of the minifloat E, a word each; `factor` and `inverse` are those of
// every even element, and of the odd one after it. False if E is not E2M1 and an element is below
// its normal numbers: then this is not the way.
template <class E>
[[gnu::always_inline]] inline bool codes_of_words(const Bf16* in, const StripScaling& s,
                                                  __m512 factor, __m512 inverse, __m512i& codes) {
  const auto scaled = [&](__m512 x) __attribute__((always_inline)) {
    const __m512 v = !s.divide    ? _mm512_mul_ps(x, factor)
                     : s.inverted ? simd::Avx512::divided(x, factor, inverse)
                                  : _mm512_div_ps(x, factor);
    return _mm512_castps_si512(_mm512_add_ps(v, _mm512_set1_ps(s.zero)));
  };
  __m512 first, second;
  ScaleLanes::load_two(in, first, second);
  const __m512i even = scaled(first), odd = scaled(second);
  // The upper halves, the last bit set if any below it is: enough for a further rounding.
  constexpr __mmask32 kOdd = 0xaaaaaaaa;
  const __m512i upper = _mm512_mask_mov_epi16(_mm512_srli_epi32(even, 16), kOdd, odd);
  const __m512i lower = _mm512_mask_mov_epi16(even, kOdd, _mm512_slli_epi32(odd, 16));
  const __m512i bits = _mm512_or_si512(upper, _mm512_min_epu16(lower, _mm512_set1_epi16(1)));
  const __m512i a = _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff));

  constexpr int kDropped = 7 - E::kMantissa;
  const __m512i last = _mm512_and_si512(_mm512_srli_epi16(a, kDropped), _mm512_set1_epi16(1));
  const __m512i half = _mm512_set1_epi16((1 << (kDropped - 1)) - 1);
  const __m512i up = _mm512_srli_epi16(_mm512_add_epi16(_mm512_add_epi16(a, half), last), kDropped);
  const __m512i normal = _mm512_sub_epi16(up, _mm512_set1_epi16((127 - E::kBias) << E::kMantissa));
  __m512i code = normal;
  if constexpr (std::is_same_v<E, E2m1>) {
    // Below 1 there are two codes: 1 above 0.25, 2 from 0.75 on.
    const __mmask32 quarter = _mm512_cmpgt_epi16_mask(a, _mm512_set1_epi16(0x3e80));
    const __mmask32 three_quarters = _mm512_cmpgt_epi16_mask(a, _mm512_set1_epi16(0x3f3f));
    const __m512i small = _mm512_mask_mov_epi16(_mm512_maskz_set1_epi16(quarter, 1), three_quarters,
                                                _mm512_set1_epi16(2));
    code = _mm512_max_epi16(normal, small);
  } else {
    constexpr auto kNormal =
        static_cast<std::int16_t>(std::bit_cast<std::uint32_t>(E::kSmallestNormal) >> 16);
    if (_mm512_cmplt_epi16_mask(a, _mm512_set1_epi16(kNormal)) != 0) return false;
  }
  code = _mm512_min_epi16(code, _mm512_set1_epi16(E::kLargestCode));
  constexpr int kOrAnd = 0xf8;  // a | (b & c)
  codes =
      _mm512_ternarylogic_epi32(code, _mm512_srli_epi16(bits, 16 - std::bit_width(E::kSignCode)),
                                _mm512_set1_epi16(E::kSignCode), kOrAnd);
  return true;
}

[[gnu::always_inline]] inline void store_words(E2m1, __m512i codes, std::uint8_t* out) {
  const __m512i pairs = _mm512_or_si512(codes, _mm512_srli_epi32(codes, 12));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(pairs));
}
[[gnu::always_inline]] inline void store_words(E4m3, __m512i codes, std::uint8_t* out) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi16_epi8(codes));
}

// The largest magnitude of each of sixteen blocks, in their order: magnitudes of bf16 are in the
// order of their bits.
template <std::size_t kBlock>
[[gnu::always_inline]] inline __m512 strip_absmax(const Bf16* in) {
  const auto magnitudes = [in](std::size_t i) __attribute__((always_inline)) {
    return _mm512_and_si512(_mm512_loadu_si512(in + 32 * i), _mm512_set1_epi16(0x7fff));
  };
  // Two blocks, one in each half.
  const auto two = [&](std::size_t i) __attribute__((always_inline)) {
    if constexpr (kBlock == 16) {
      return magnitudes(i);
    } else {
      const __m512i a = magnitudes(2 * i), b = magnitudes(2 * i + 1);
      return _mm512_max_epu16(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xee));
    }
  };
  // Within each 128 bits: eight words of two vectors to four, of four to two, of eight to one.
  const auto four = [&](std::size_t i) __attribute__((always_inline)) {
    const __m512i a = two(i), b = two(i + 1);
    return _mm512_max_epu16(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  };
  const auto eight = [&](std::size_t i) __attribute__((always_inline)) {
    const __m512 a = _mm512_castsi512_ps(four(i)), b = _mm512_castsi512_ps(four(i + 2));
    return _mm512_max_epu16(_mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88)),
                            _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd)));
  };
  constexpr __mmask32 kOdd = 0xaaaaaaaa;
  const __m512i a = eight(0), b = eight(4);
  const __m512i words = _mm512_max_epu16(_mm512_mask_mov_epi16(a, kOdd, _mm512_slli_epi32(b, 16)),
                                         _mm512_mask_mov_epi16(_mm512_srli_epi32(a, 16), kOdd, b));
  const __m512i all = _mm512_max_epu16(words, _mm512_shuffle_i64x2(words, words, 0xb1));
  // Blocks 0 to 7 in the lower words, 8 to 15 in the upper; even ones in 128 bits, odd in others.
  const __m512i order = _mm512_set_epi32(27, 19, 26, 18, 25, 17, 24, 16, 11, 3, 10, 2, 9, 1, 8, 0);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return _mm512_permutex2var_ps(_mm512_castsi512_ps(_mm512_slli_epi32(all, 16)), order,
                                _mm512_castsi512_ps(_mm512_and_si512(all, upper)));
}

// Other formats, with blocks of another size or other elements, go block by block.
template <class F>
inline constexpr bool kInStrips = F::kShape == BlockShape::kRow &&
                                  ((std::is_same_v<typename F::Element, E2m1> &&
                                    (F::kBlock == 16 || F::kBlock == 32)) ||
                                   (std::is_same_v<typename F::Element, E4m3> && F::kBlock == 32));

template <class F>
requires kInStrips<F>
struct Strip<F, simd::Avx512, Bf16> {
  static constexpr std::size_t kBlocks = 16;
  using Element = typename F::Element;

  [[gnu::always_inline]] static bool quantize(const QuantizeJob& job, std::size_t block,
                                              const RuleContext& context) {
    const Bf16* in = static_cast<const Bf16*>(job.input) + block * F::kBlock;
    std::uint8_t* out = job.values + block * F::kBlock / F::kPerByte;
    const __m512 absmax = strip_absmax<F::kBlock>(in);
    const __m512 infinity = _mm512_castsi512_ps(_mm512_set1_epi32(0x7f800000));
    if (_mm512_cmp_ps_mask(absmax, infinity, _CMP_NLT_UQ) != 0) return false;
    const StripScaling s = choose(job, block, context, absmax);
    constexpr std::size_t kPieces = kBlocks * F::kBlock / 32;
    for (std::size_t p = 0; p < kPieces; ++p) {
      const __m512i second = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
      const __m512i piece = _mm512_set1_epi32(static_cast<int>(p * 32 / F::kBlock));
      const __m512i index = F::kBlock == 16 ? _mm512_add_epi32(piece, second) : piece;
      const __m512 factor = _mm512_permutexvar_ps(index, s.factors);
      const __m512 inverse = _mm512_permutexvar_ps(index, s.inverses);
      __m512i codes;
      if (codes_of_words<Element>(in + 32 * p, s, factor, inverse, codes)) [[likely]]
        store_words(Element{}, codes, out + 32 / F::kPerByte * p);
      else
        encode_slowly(in + 32 * p, s, _mm512_cvtss_f32(factor), out + 32 / F::kPerByte * p);
    }
    return true;
  }

 private:
  [[gnu::noinline]] static void encode_slowly(const Bf16* in, const StripScaling& s, float factor,
                                              std::uint8_t* out) {
    const Scaling scaling = {factor, s.divide, s.zero};
    for (std::size_t i = 0; i < 32; i += simd::Avx512::kEncodeAs)
      simd::Avx512::encode_as<Element>(in + i, scaling, out + i / F::kPerByte);
  }

  // Writes the scales.
  [[gnu::always_inline]] static StripScaling choose(const QuantizeJob& job, std::size_t block,
                                                    const RuleContext& context, __m512 absmax) {
    if constexpr (requires { F::template choose<ScaleLanes>(context, absmax); }) {
      const auto chosen = F::template choose<ScaleLanes>(context, absmax);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(job.scales + block),
                       _mm512_cvtepi32_epi8(simd::Avx512::codes_of<E4m3>(chosen.scale)));
      return strip_scaling(chosen.factor, F::scaling(context.rule));
    } else {
      alignas(64) float numbers[kBlocks];
      _mm512_store_ps(numbers, absmax);
      BlockScale chosen;
      for (std::size_t b = 0; b < kBlocks; ++b) {
        chosen = F::choose_scale(context, numbers[b]);
        job.scales[block + b] = static_cast<std::uint8_t>(chosen.stored);
        numbers[b] = chosen.scaling.factor;
      }
      return strip_scaling(_mm512_load_ps(numbers), chosen.scaling);
    }
  }
};

}  // namespace monograph
