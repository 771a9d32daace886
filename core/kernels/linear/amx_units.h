// From packed bytes to bf16 in the order of tiles, 32 elements of a row at a time: a group. A
// group is stored in the order in which 4-bit codes are cheapest to unpack: position 8 * i + j
// holds element 4 * j + i. A unit is one or two neighbouring groups.
//
// TileDecoder<F> is what a panel's decoder knows of a weight; its unit(row, col, element) reads the
// scales of a unit, and the unit's group<g>(bytes) gives the elements. There are three kinds:
//   absmax formats     one scale for the unit: sixteen products, rounded to bf16, in a register
//   scales of a byte   (MXFP4, NVFP4): the products of all 256 scales stand ready in CodeTables
//   E4M3 elements      (MXFP8, FP8 blocks): by way of fp16 and fp32
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "kernels/linear/elements.h"
#include "simd/amx.h"

namespace monograph {

[[gnu::always_inline]] inline __m512i to_tile_order(__m512i in_order) {
  alignas(64) static constexpr std::uint16_t kOrder[32] = {
      0, 4, 8,  12, 16, 20, 24, 28, 1, 5, 9,  13, 17, 21, 25, 29,
      2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), in_order);
}

// Lane i has element 4 * j + i in the low bits of word j; the bits above are those of its
// neighbours.
template <Nibbles kNibbles>
[[gnu::always_inline]] inline __m512i codes_in_tile_order(const std::uint8_t* packed) {
  constexpr bool kHigh = kNibbles == Nibbles::kHighFirst;
  constexpr long long kOnes = 0x0001000100010001;
  constexpr long long k0 = kHigh ? 4 * kOnes : 0, k1 = kHigh ? 0 : 4 * kOnes;
  constexpr long long k2 = kHigh ? 12 * kOnes : 8 * kOnes, k3 = kHigh ? 8 * kOnes : 12 * kOnes;
  const __m512i shifts = _mm512_set_epi64(k3, k3, k2, k2, k1, k1, k0, k0);
  const __m512i bytes =
      _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed)));
  return _mm512_srlv_epi16(bytes, shifts);
}

template <class F>
inline constexpr bool kHasElements = requires {
  typename F::Element;
};

// Absmax formats. A permute reads five bits of an index, and the table stands in its register
// twice: the neighbours' bits need no mask.
template <class F>
class TileDecoder {
 public:
  [[gnu::always_inline]] explicit TileDecoder(const DecodeJob& job)
      : weight_(job.weight->packed),
        shift_(__builtin_ctzll(weight_.block)) {}  // a block is a power of two

  struct Unit {
    __m512i values;
    template <std::size_t g>
    [[gnu::always_inline]] __m512i group(const std::uint8_t* packed) const {
      return _mm512_permutexvar_epi16(codes_in_tile_order<F::kNibbles>(packed), values);
    }
  };

  [[gnu::always_inline]] Unit unit(std::size_t, std::size_t, std::size_t element) const {
    const __m512 scale = _mm512_set1_ps(F::block_scale(weight_, element >> shift_));
    const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(F::kValues), scale);
    // Flushes subnormals, as the tile product does with what it reads.
    return {reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(scaled, scaled))};
  }

 private:
  const PackedView weight_;  // a copy: the compiler would read a reference again after every store
  const int shift_;
};

// E2M1 elements with a scale of one byte for 16 of them, or for 32 or more.
template <class F>
requires(kHasElements<F>&& F::kPerByte == 2) class TileDecoder<F> {
 public:
  [[gnu::always_inline]] explicit TileDecoder(const DecodeJob& job)
      : scales_(job.weight->packed.scales.blocks), tables_(job.tables->entries) {}

  struct Unit {
    const std::uint8_t* scales;
    const std::uint16_t (*tables)[16];

    [[gnu::always_inline]] __m256i table(std::size_t i) const {
      return _mm256_load_si256(reinterpret_cast<const __m256i*>(tables[scales[i]]));
    }
    template <std::size_t g>
    [[gnu::always_inline]] __m512i group(const std::uint8_t* packed) const {
      const __m512i codes = codes_in_tile_order<F::kNibbles>(packed);
      if constexpr (F::kBlock >= 32) {
        constexpr std::size_t kBlockOfGroup = g * 32 / F::kBlock;
        return _mm512_permutexvar_epi16(codes, _mm512_broadcast_i64x4(table(kBlockOfGroup)));
      } else {
        // Two tables in one register; bit 4 chooses, set for the words of elements 16 to 31.
        const __m512i upper = _mm512_set_epi64(kSecond, 0, kSecond, 0, kSecond, 0, kSecond, 0);
        const __m512i index =
            _mm512_ternarylogic_epi32(codes, _mm512_set1_epi16(15), upper, kAndThenOr);
        const __m512i both =
            _mm512_inserti64x4(_mm512_castsi256_si512(table(2 * g)), table(2 * g + 1), 1);
        return _mm512_permutexvar_epi16(index, both);
      }
    }
    static constexpr long long kSecond = 0x0010001000100010;
    static constexpr int kAndThenOr = 0xea;  // (a & b) | c
  };

  [[gnu::always_inline]] Unit unit(std::size_t, std::size_t, std::size_t element) const {
    return {scales_ + element / F::kBlock, tables_};
  }

 private:
  const std::uint8_t* const scales_;
  const std::uint16_t (*const tables_)[16];
};

// A group that holds a NaN, or whose scale is beyond what the fast road can multiply with.
template <class V>
[[gnu::noinline]] __m512i e4m3_group_slowly(const std::uint8_t* codes, float scale) {
  alignas(64) Bf16 elements[32];
  for (std::size_t i = 0; i < 32; ++i)
    elements[i] = from_float<Bf16>(E4m3::decode(codes[i]) * scale);
  return to_tile_order(_mm512_load_si512(elements));
}

// What multiplies a group: the scale times 2^8, and whether the fast road may take it.
struct E4m3Scale {
  float scale;
  bool plain;
  __m512 factor;

  [[gnu::always_inline]] explicit E4m3Scale(float s)
      : scale(s), plain(s < 0x1p119f), factor(_mm512_set1_ps(s * 256.0f)) {}
};

// E4M3's bits are those of an fp16 number 2^-8 as large, subnormals included; the product with the
// scale is rounded to fp32 and then to bf16, as `dequantize` does it.
template <class V>
[[gnu::always_inline]] inline __m512i e4m3_group(const std::uint8_t* packed, const E4m3Scale& s) {
  const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed));
  const __m256i sign = _mm256_set1_epi8(static_cast<char>(0x80));
  const __mmask32 nan = _mm256_cmpeq_epi8_mask(_mm256_or_si256(codes, sign), _mm256_set1_epi8(-1));
  if (nan != 0 || !s.plain) [[unlikely]]
    return e4m3_group_slowly<V>(packed, s.scale);
  // Word p takes the code of its element as its upper byte; the lower one is cut off below.
  alignas(64) static constexpr std::uint8_t kOrder[64] = {
      0, 0,  0, 4,  0, 8,  0, 12, 0, 16, 0, 20, 0, 24, 0, 28, 0, 1,  0, 5,  0, 9,
      0, 13, 0, 17, 0, 21, 0, 25, 0, 29, 0, 2,  0, 6,  0, 10, 0, 14, 0, 18, 0, 22,
      0, 26, 0, 30, 0, 3,  0, 7,  0, 11, 0, 15, 0, 19, 0, 23, 0, 27, 0, 31};
  const __m512i words =
      _mm512_permutexvar_epi8(_mm512_load_si512(kOrder), _mm512_castsi256_si512(codes));
  const __m512i half =
      _mm512_and_si512(_mm512_srai_epi16(words, 1), _mm512_set1_epi16(static_cast<short>(0xbf80)));
  const __m512 low = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(half)), s.factor);
  const __m512 high = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1)), s.factor);
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

template <class F>
requires(kHasElements<F>&& F::kPerByte == 1) class TileDecoder<F> {
 public:
  static constexpr bool kSquare = F::kShape == BlockShape::kSquare;
  static_assert(F::kBlock >= 32);

  [[gnu::always_inline]] explicit TileDecoder(const DecodeJob& job)
      : weight_(job.weight->packed), across_(ceil_div(weight_.cols, F::kBlock)) {}

  struct RowUnit {
    const std::uint8_t* scales;
    template <std::size_t g>
    [[gnu::always_inline]] __m512i group(const std::uint8_t* packed) const {
      return e4m3_group<simd::Amx>(packed, E4m3Scale(e8m0_value(scales[g * 32 / F::kBlock])));
    }
  };
  struct SquareUnit {
    E4m3Scale scale;
    template <std::size_t g>
    [[gnu::always_inline]] __m512i group(const std::uint8_t* packed) const {
      return e4m3_group<simd::Amx>(packed, scale);
    }
  };
  using Unit = std::conditional_t<kSquare, SquareUnit, RowUnit>;

  [[gnu::always_inline]] Unit unit(std::size_t row, std::size_t col, std::size_t element) const {
    // square_block() without its divisions: they would take as long as the unit.
    if constexpr (kSquare)
      return {E4m3Scale(F::block_scale(weight_, row / F::kBlock * across_ + col / F::kBlock))};
    else
      return {weight_.scales.blocks + element / F::kBlock};
  }

 private:
  const PackedView weight_;
  const std::size_t across_;  // blocks
};

// Fills the tables of a weight whose scales are bytes; false for a format that needs none.
template <class F, class V>
[[gnu::always_inline]] inline bool fill_tables(const PackedView& weight, CodeTables& tables) {
  if constexpr (kHasElements<F>) {
    if constexpr (F::kPerByte == 2) {
      PackedView one = weight;
      for (int stored = 0; stored < 256; ++stored) {
        const std::uint8_t byte = static_cast<std::uint8_t>(stored);
        one.scales.blocks = &byte;
        const auto table = V::template scaled_table<Bf16>(F::kValues, F::block_scale(one, 0));
        _mm256_store_si256(reinterpret_cast<__m256i*>(tables.entries[stored]),
                           _mm512_castsi512_si256(table));
      }
      return true;
    }
  }
  return false;
}

}  // namespace monograph
