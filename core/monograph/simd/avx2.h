// The vocabulary on AVX2 with F16C: eight floats or sixteen halves per vector.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "monograph/base/float_types.h"
#include "monograph/base/minifloat.h"
#include "monograph/base/nibbles.h"
#include "monograph/base/scaling.h"
#include "monograph/cpu/tags.h"

namespace monograph::simd {

struct Avx2 {
  template <class T>
  static constexpr std::size_t kLanes = 32 / sizeof(T);
  template <class T>
  using Vec = std::conditional_t<sizeof(T) == 4, __m256, __m256i>;
  struct FloatTable {
    __m256 low, high;  // entries 0-7 and 8-15
  };
  struct HalfTable {
    __m128i low, high;  // low and high bytes of the sixteen entries
  };
  template <class T>
  using Table = std::conditional_t<sizeof(T) == 4, FloatTable, HalfTable>;
  using Narrow = Scalar;  // for blocks shorter than a vector

  // Round to nearest even in integers; NaN becomes 0x7fc0.
  [[gnu::always_inline]] static __m128i to_bf16(__m256 x) {
    const __m256i u = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i rounded =
        _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fc0), nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
  }

  [[gnu::always_inline]] static __m128i to_fp16(__m256 x) {
    return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }

  template <class T>
  [[gnu::always_inline]] static __m256 load_f32(const T* p) {
    if constexpr (sizeof(T) == 4) {
      return _mm256_loadu_ps(p);
    } else {
      const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      if constexpr (std::is_same_v<T, Bf16>)
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
      else
        return _mm256_cvtph_ps(bits);
    }
  }

  template <class T>
  [[gnu::always_inline]] static Table<T> scaled_table(const float (&values)[16], float scale) {
    const __m256 s = _mm256_set1_ps(scale);
    const __m256 low = _mm256_mul_ps(_mm256_loadu_ps(values), s);
    const __m256 high = _mm256_mul_ps(_mm256_loadu_ps(values + 8), s);
    if constexpr (sizeof(T) == 4) {
      return {low, high};
    } else {
      const __m128i a = std::is_same_v<T, Bf16> ? to_bf16(low) : to_fp16(low);
      const __m128i b = std::is_same_v<T, Bf16> ? to_bf16(high) : to_fp16(high);
      const __m128i byte = _mm_set1_epi16(0xff);
      return {_mm_packus_epi16(_mm_and_si128(a, byte), _mm_and_si128(b, byte)),
              _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8))};
    }
  }

  // The codes of eight bytes, one a byte, in the order of the elements.
  template <Nibbles kNibbles>
  [[gnu::always_inline]] static __m128i nibbles_of(__m128i bytes) {
    const __m128i high = _mm_srli_epi16(bytes, 4);
    const __m128i pairs = kNibbles == Nibbles::kHighFirst ? _mm_unpacklo_epi8(high, bytes)
                                                          : _mm_unpacklo_epi8(bytes, high);
    return _mm_and_si128(pairs, _mm_set1_epi8(15));
  }

  // Halves by two byte shuffles; floats by two permutes and a blend on bit 3 of the index.
  template <class T, Nibbles kNibbles>
  [[gnu::always_inline]] static Vec<T> lookup(const Table<T>& table, const std::uint8_t* packed) {
    if constexpr (sizeof(T) == 4) {
      std::int32_t four;
      std::memcpy(&four, packed, 4);
      const __m128i bytes = _mm_cvtsi32_si128(four);
      const __m256i index = _mm256_cvtepu8_epi32(nibbles_of<kNibbles>(bytes));
      const __m256 low = _mm256_permutevar8x32_ps(table.low, index);
      const __m256 high = _mm256_permutevar8x32_ps(table.high, index);
      return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
    } else {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed));
      const __m128i nibbles = nibbles_of<kNibbles>(bytes);
      const __m128i low = _mm_shuffle_epi8(table.low, nibbles);
      const __m128i high = _mm_shuffle_epi8(table.high, nibbles);
      return _mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high));
    }
  }

  // By way of fp16, whose subnormals cost nothing and need no flag: E4M3's bits are those of an
  // fp16 number 2^-8 as large.
  [[gnu::always_inline]] static __m256 e4m3_times(const std::uint8_t* codes, float scale) {
    const __m128i words =
        _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    const __m128i half = _mm_and_si128(_mm_srai_epi16(_mm_slli_epi16(words, 8), 1),
                                       _mm_set1_epi16(static_cast<short>(0xbfff)));
    const __m256 exact = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
    const __m128i nan_code = _mm_set1_epi16(0x7f);
    const __m256i nan =
        _mm256_cvtepi16_epi32(_mm_cmpeq_epi16(_mm_and_si128(words, nan_code), nan_code));
    const __m256 value = _mm256_blendv_ps(exact, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)),
                                          _mm256_castsi256_ps(nan));
    return _mm256_mul_ps(value, _mm256_set1_ps(scale));
  }

  template <class T>
  [[gnu::always_inline]] static float e4m3_scale(float scale) {
    return scale;
  }
  template <class T>
  [[gnu::always_inline]] static Vec<T> scaled_e4m3(const std::uint8_t* codes, float scale) {
    if constexpr (sizeof(T) == 4) {
      return e4m3_times(codes, scale);
    } else {
      const __m256 low = e4m3_times(codes, scale), high = e4m3_times(codes + 8, scale);
      const __m128i a = std::is_same_v<T, Bf16> ? to_bf16(low) : to_fp16(low);
      const __m128i b = std::is_same_v<T, Bf16> ? to_bf16(high) : to_fp16(high);
      return _mm256_set_m128i(b, a);
    }
  }

  [[gnu::always_inline]] static __m256 int8_times(const std::uint8_t* codes, std::uint8_t flip,
                                                  int zero, float scale) {
    const __m128i bytes = _mm_xor_si128(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)),
                                        _mm_set1_epi8(static_cast<char>(flip)));
    const __m256i differences =
        _mm256_sub_epi32(_mm256_cvtepi8_epi32(bytes), _mm256_set1_epi32(zero));
    return _mm256_mul_ps(_mm256_cvtepi32_ps(differences), _mm256_set1_ps(scale));
  }
  template <class T>
  [[gnu::always_inline]] static Vec<T> scaled_int8(const std::uint8_t* codes, std::uint8_t flip,
                                                   int zero, float scale) {
    if constexpr (sizeof(T) == 4) {
      return int8_times(codes, flip, zero, scale);
    } else {
      const __m256 low = int8_times(codes, flip, zero, scale);
      const __m256 high = int8_times(codes + 8, flip, zero, scale);
      const __m128i a = std::is_same_v<T, Bf16> ? to_bf16(low) : to_fp16(low);
      const __m128i b = std::is_same_v<T, Bf16> ? to_bf16(high) : to_fp16(high);
      return _mm256_set_m128i(b, a);
    }
  }

  template <class T>
  [[gnu::always_inline]] static Vec<T> scaled_int8_less(const std::uint8_t* codes, float scale,
                                                        float minimum) {
    const __m256 less = _mm256_set1_ps(minimum);
    const __m256 low = _mm256_sub_ps(int8_times(codes, 0, 0, scale), less);
    if constexpr (sizeof(T) == 4) {
      return low;
    } else {
      const __m256 high = _mm256_sub_ps(int8_times(codes + 8, 0, 0, scale), less);
      const __m128i a = std::is_same_v<T, Bf16> ? to_bf16(low) : to_fp16(low);
      const __m128i b = std::is_same_v<T, Bf16> ? to_bf16(high) : to_fp16(high);
      return _mm256_set_m128i(b, a);
    }
  }

  // The fp16 number at any address.
  [[gnu::always_inline]] static float half_at(const std::uint8_t* p) {
    std::uint16_t bits;
    std::memcpy(&bits, p, sizeof bits);
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
  }

  [[gnu::always_inline]] static void lookup_bytes(const std::uint8_t (&table)[16],
                                                  std::uint8_t* codes) {
    const __m256i both =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    auto* const place = reinterpret_cast<__m256i*>(codes);
    _mm256_storeu_si256(place, _mm256_shuffle_epi8(both, _mm256_loadu_si256(place)));
  }

  template <class T>
  [[gnu::always_inline]] static void store(T* out, Vec<T> v) {
    if constexpr (sizeof(T) == 4)
      _mm256_storeu_ps(out, v);
    else
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), v);
  }

  // Past the caches; `out` aligned to 32 bytes. stream_end() orders what was streamed.
  template <class T>
  [[gnu::always_inline]] static void stream(T* out, Vec<T> v) {
    if constexpr (sizeof(T) == 4)
      _mm256_stream_ps(out, v);
    else
      _mm256_stream_si256(reinterpret_cast<__m256i*>(out), v);
  }
  [[gnu::always_inline]] static void stream_end() { _mm_sfence(); }

  [[gnu::always_inline]] static void prefetch(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
  }
  [[gnu::always_inline]] static void prefetch_second(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
  }

  template <class T>
  [[gnu::always_inline]] static std::uint32_t absmax_bits(const T* in, std::size_t count) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    __m256i largest = _mm256_setzero_si256();
    std::size_t i = 0;
    for (; i + 8 <= count; i += 8) {
      const __m256i a = _mm256_and_si256(_mm256_castps_si256(load_f32(in + i)), mask);
      largest = _mm256_max_epu32(largest, a);
    }
    const __m128i four =
        _mm_max_epu32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    const __m128i two = _mm_max_epu32(four, _mm_unpackhi_epi64(four, four));
    const __m128i one = _mm_max_epu32(two, _mm_shuffle_epi32(two, 1));
    std::uint32_t result = static_cast<std::uint32_t>(_mm_cvtsi128_si32(one));
    for (; i < count; ++i) {
      const std::uint32_t a = std::bit_cast<std::uint32_t>(to_float(in[i])) & 0x7fffffff;
      result = a > result ? a : result;
    }
    return result;
  }

  struct Encoder {
    const float* bounds;
    __m128i order;
  };
  [[gnu::always_inline]] static Encoder encoder(const float (&bounds)[16],
                                                const std::uint8_t (&order)[16]) {
    return {bounds, _mm_loadu_si128(reinterpret_cast<const __m128i*>(order))};
  }

  static constexpr std::size_t kEncode = 16;

  template <class T>
  [[gnu::always_inline]] static void encode(const Encoder& e, const T* in, float inverse,
                                            std::uint8_t* packed) {
    const __m256 scale = _mm256_set1_ps(inverse);
    const __m128i first = count_below(e, _mm256_mul_ps(load_f32(in), scale));
    const __m128i second = count_below(e, _mm256_mul_ps(load_f32(in + 8), scale));
    const __m128i codes = _mm_shuffle_epi8(e.order, _mm_packus_epi16(first, second));
    const __m128i pairs = _mm_maddubs_epi16(codes, _mm_set1_epi16(0x0110));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(packed), _mm_packus_epi16(pairs, pairs));
  }

  // How many of the fifteen bounds lie below each lane, as eight 16-bit numbers.
  [[gnu::always_inline]] static __m128i count_below(const Encoder& e, __m256 v) {
    __m256i count = _mm256_setzero_si256();
    for (int i = 0; i < 15; ++i) {
      const __m256 above = _mm256_cmp_ps(v, _mm256_broadcast_ss(e.bounds + i), _CMP_GT_OQ);
      count = _mm256_sub_epi32(count, _mm256_castps_si256(above));
    }
    return _mm_packus_epi32(_mm256_castsi256_si128(count), _mm256_extracti128_si256(count, 1));
  }

  static constexpr std::size_t kEncodeAs = 16;

  template <class E, class T>
  [[gnu::always_inline]] static void encode_as(const T* in, const Scaling& s, std::uint8_t* out) {
    const __m128i codes =
        _mm_packus_epi16(codes_of<E>(load_f32(in), s), codes_of<E>(load_f32(in + 8), s));
    if constexpr (E::kSignCode == 8) {
      const __m128i pairs = _mm_maddubs_epi16(codes, _mm_set1_epi16(0x1001));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(pairs, pairs));
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out), codes);
    }
  }

  // E::encode() of eight scaled elements, as eight 16-bit numbers.
  template <class E>
  [[gnu::always_inline]] static __m128i codes_of(__m256 x, const Scaling& s) {
    constexpr int kDropped = 23 - E::kMantissa;
    const __m256 factor = _mm256_set1_ps(s.factor);
    const __m256 quotient = s.divide ? _mm256_div_ps(x, factor) : _mm256_mul_ps(x, factor);
    const __m256i bits = _mm256_castps_si256(_mm256_add_ps(quotient, _mm256_set1_ps(s.zero)));
    const __m256i a = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(a, kDropped), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32((1 << (kDropped - 1)) - 1));
    const __m256i normal = _mm256_sub_epi32(_mm256_srli_epi32(_mm256_add_epi32(a, half), kDropped),
                                            _mm256_set1_epi32((127 - E::kBias) << E::kMantissa));
    const __m256 aligned = _mm256_set1_ps(E::kAligned);
    const __m256i small =
        _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(a), aligned)),
                         _mm256_castps_si256(aligned));
    const __m256i below = _mm256_castps_si256(
        _mm256_cmp_ps(_mm256_castsi256_ps(a), _mm256_set1_ps(E::kSmallestNormal), _CMP_LT_OQ));
    const __m256i code = _mm256_min_epu32(_mm256_blendv_epi8(normal, small, below),
                                          _mm256_set1_epi32(E::kLargestCode));
    const __m256i sign =
        _mm256_and_si256(_mm256_srli_epi32(bits, 31 - std::bit_width(E::kSignCode) + 1),
                         _mm256_set1_epi32(E::kSignCode));
    const __m256i both = _mm256_or_si256(code, sign);
    return _mm_packus_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  }
};

}  // namespace monograph::simd
