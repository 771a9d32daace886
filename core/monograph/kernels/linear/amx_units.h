// From packed bytes to bf16 in the order of tiles, 32 elements of a row at a time: a group. A
// group is stored in the order in which 4-bit codes are cheapest to unpack: position 8 * i + j
// holds element 4 * j + i. A unit is one or two neighbouring groups.
//
// TileDecoder<F> is what a panel's decoder knows of a weight; it can decode the panels for which it
// fits(job), the others pass through a buffer. Its unit(row, col, element) finds the scales of a
// unit, the unit's groups<kUnit>(bytes, store) calls store(g, elements) for each group, and
// scale_of(element) is where a scale stands, to prefetch it. There are four kinds:
//   absmax formats     one scale for the unit: sixteen products, rounded to bf16, in a register
//   scales of a byte   (MXFP4, NVFP4): the products of all 256 scales stand ready in CodeTables
//   E4M3 elements      (MXFP8, FP8 blocks): the rounded product of each mantissa with the scale
//                      from a register, and the exponent added to it
//   plain bf16         no scales
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "monograph/kernels/linear/elements.h"
#include "monograph/simd/amx.h"
#include "monograph/simd/unrolled.h"

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

// The rows and columns of a weight that a panel is made of.
struct WeightArea {
  std::size_t row, rows, col, cols;
};

template <class F>
inline constexpr bool kHasElements = requires {
  typename F::Element;
};

// Absmax formats. A permute reads five bits of an index, and the table stands in its register
// twice: the neighbours' bits need no mask.
template <class F>
class TileDecoder {
 public:
  [[gnu::always_inline]] static bool fits(const DecodeJob&) { return true; }
  [[gnu::always_inline]] TileDecoder(const DecodeJob& job, const WeightArea&)
      : blocks_(job.weight->packed.scales.blocks),
        groups_(job.weight->packed.scales.groups),
        map_(job.weight->packed.scales.map),
        offset_(job.weight->packed.scales.offset),
        shift_(__builtin_ctzll(job.weight->packed.block)) {}  // a block is a power of two

  struct Unit {
    __m512i values;
    template <std::size_t kUnit, class Store>
    [[gnu::always_inline]] void groups(const std::uint8_t* packed, Store store) const {
      unrolled<kUnit>([&](auto g)
                          __attribute__((always_inline)) { store(g, group<g>(packed + 16 * g)); });
    }
    template <std::size_t g>
    [[gnu::always_inline]] __m512i group(const std::uint8_t* packed) const {
      return _mm512_permutexvar_epi16(codes_in_tile_order<F::kNibbles>(packed), values);
    }
  };

  // Where the scale of an element stands.
  [[gnu::always_inline]] const void* scale_of(std::size_t element) const {
    return blocks_ + (element >> shift_) * (groups_ != nullptr ? 1 : 4);
  }
  [[gnu::always_inline]] Unit unit(std::size_t, std::size_t, std::size_t element) const {
    const __m512 scale =
        _mm512_set1_ps(absmax_scale({blocks_, groups_, map_, offset_}, element >> shift_));
    const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(F::kValues), scale);
    // Flushes subnormals, as the tile product does with what it reads.
    return {reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(scaled, scaled))};
  }

 private:
  // Copies: the compiler would read a reference again after every store.
  const std::uint8_t *const blocks_, *const groups_, *const map_;
  const float offset_;
  const int shift_;
};

// A weight in bf16, which only needs another order.
template <>
class TileDecoder<Plain> {
 public:
  [[gnu::always_inline]] static bool fits(const DecodeJob& job) {
    return job.weight->dtype == DType::kBFloat16;
  }
  [[gnu::always_inline]] TileDecoder(const DecodeJob&, const WeightArea&) {}

  struct Unit {
    template <std::size_t kUnit, class Store>
    [[gnu::always_inline]] void groups(const std::uint8_t* elements, Store store) const {
      unrolled<kUnit>([&](auto g) __attribute__((always_inline)) {
        store(g, to_tile_order(_mm512_loadu_si512(elements + 64 * g)));
      });
    }
  };
  [[gnu::always_inline]] Unit unit(std::size_t, std::size_t, std::size_t) const { return {}; }
};

// A decoder whose scales are bytes, for which CodeTables stand ready.
template <class F, class U>
class ByteScales {
 public:
  using Unit = U;
  [[gnu::always_inline]] static bool fits(const DecodeJob& job) { return job.tables != nullptr; }
  [[gnu::always_inline]] ByteScales(const DecodeJob& job, const WeightArea&)
      : scales_(job.weight->packed.scales.blocks), tables_(job.tables->entries) {}

  [[gnu::always_inline]] Unit unit(std::size_t, std::size_t, std::size_t element) const {
    return {scales_ + element / F::kBlock, tables_};
  }
  [[gnu::always_inline]] const void* scale_of(std::size_t element) const {
    return scales_ + element / F::kBlock;
  }

 private:
  const std::uint8_t* const scales_;
  const std::uint16_t (*const tables_)[16];
};

// E2M1 elements with a scale of one byte for 16 of them, or for 32 or more.
template <class F>
struct E2m1Unit {
  const std::uint8_t* scales;
  const std::uint16_t (*tables)[16];

  [[gnu::always_inline]] __m256i table(std::size_t i) const {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(tables[scales[i]]));
  }
  template <std::size_t kUnit, class Store>
  [[gnu::always_inline]] void groups(const std::uint8_t* packed, Store store) const {
    unrolled<kUnit>([&](auto g)
                        __attribute__((always_inline)) { store(g, group<g>(packed + 16 * g)); });
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

template <class F>
requires(kHasElements<F>&& F::kPerByte == 2) class TileDecoder<F>
    : public ByteScales<F, E2m1Unit<F>> {
  using ByteScales<F, E2m1Unit<F>>::ByteScales;
};

// V::e4m3_scale by the instruction for bf16: it flushes subnormals, of which there are none here.
template <class V>
[[gnu::always_inline]] inline typename V::E4m3Scale tile_scale(float scale) {
  const __m512 mantissas =
      _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 15, 14, 13, 12, 11, 10, 9, 8);
  const __m512 product = _mm512_mul_ps(mantissas, _mm512_set1_ps(scale));
  const __m512i rounded = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(product, product));
  return {scale, V::is_fast_e4m3(scale), _mm512_sub_epi16(rounded, _mm512_set1_epi16(10 << 7))};
}

// Word p of the result has the code of its element in both bytes, for group g of the codes.
template <std::size_t g>
[[gnu::always_inline]] inline __m512i e4m3_in_tile_order(__m512i codes) {
  alignas(64) static constexpr std::uint8_t kOrder[64] = {
      0,  0,  4,  4,  8,  8,  12, 12, 16, 16, 20, 20, 24, 24, 28, 28, 1,  1,  5,  5,  9,  9,
      13, 13, 17, 17, 21, 21, 25, 25, 29, 29, 2,  2,  6,  6,  10, 10, 14, 14, 18, 18, 22, 22,
      26, 26, 30, 30, 3,  3,  7,  7,  11, 11, 15, 15, 19, 19, 23, 23, 27, 27, 31, 31};
  const __m512i order =
      _mm512_add_epi8(_mm512_load_si512(kOrder), _mm512_set1_epi8(static_cast<char>(32 * g)));
  return _mm512_permutexvar_epi8(order, codes);
}

// One group with any codes and scale. The scale by value: a reference to all of an E4m3Scale would
// keep it in memory on the fast path too.
template <class V>
[[gnu::noinline]] __m512i e4m3_group_slowly(const std::uint8_t* packed, float scale) {
  const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed));
  if (V::is_fast_e4m3(scale) && !V::any_nan_e4m3(codes))
    return V::finite_e4m3(e4m3_in_tile_order<0>(_mm512_castsi256_si512(codes)),
                          tile_scale<V>(scale));
  return to_tile_order(V::template scaled_e4m3<Bf16>(packed, scale));
}

// The groups of a unit. `scale` has fast<g>(), products<g>() (simd/avx512.h: E4m3Scale) and
// value<g>() of each, the last only looked at where it is wanted.
template <class V, std::size_t kUnit, class Scale, class Store>
[[gnu::always_inline]] inline void e4m3_groups(const std::uint8_t* packed, const Scale& scale,
                                               Store store) {
  const __m256i* const bytes = reinterpret_cast<const __m256i*>(packed);
  const __m512i codes =
      kUnit == 2 ? _mm512_loadu_si512(packed) : _mm512_broadcast_i64x4(_mm256_loadu_si256(bytes));
  const bool fast = scale.template fast<0>() && scale.template fast<kUnit - 1>();
  if (fast && V::all_normal_e4m3(codes)) [[likely]] {
    unrolled<kUnit>([&](auto g) __attribute__((always_inline)) {
      store(g, V::normal_e4m3(e4m3_in_tile_order<g>(codes), scale.template products<g>()));
    });
  } else {
    unrolled<kUnit>([&](auto g) __attribute__((always_inline)) {
      store(g, e4m3_group_slowly<V>(packed + 32 * g, scale.template value<g>()));
    });
  }
}

// E4M3 elements with a power of two for a part of a row.
template <class F>
struct MxE4m3Unit {
  static_assert(F::kBlock >= 32);
  const std::uint8_t* scales;
  const std::uint16_t (*tables)[16];

  template <std::size_t g>
  [[gnu::always_inline]] std::uint8_t stored() const {
    return scales[g * 32 / F::kBlock];
  }
  template <std::size_t g>
  [[gnu::always_inline]] bool fast() const {
    return simd::Amx::is_fast_e8m0(stored<g>());
  }
  template <std::size_t g>
  [[gnu::always_inline]] __m512i products() const {
    const __m128i* const table = reinterpret_cast<const __m128i*>(tables[stored<g>()]);
    return _mm512_broadcast_i32x4(_mm_load_si128(table));
  }
  template <std::size_t g>
  [[gnu::always_inline]] float value() const {
    return e8m0_value(stored<g>());
  }
  template <std::size_t kUnit, class Store>
  [[gnu::always_inline]] void groups(const std::uint8_t* packed, Store store) const {
    e4m3_groups<simd::Amx, kUnit>(packed, *this, store);
  }
};

template <class F>
requires(kHasElements<F>&& F::kPerByte == 1 && F::kShape == BlockShape::kRow) class TileDecoder<F>
    : public ByteScales<F, MxE4m3Unit<F>> {
  using ByteScales<F, MxE4m3Unit<F>>::ByteScales;
};

// Square blocks that a panel may touch, of this side or a larger one. Its columns begin where a
// block does, or lie in one; its rows may begin anywhere.
inline constexpr std::size_t kMostSquares = 32, kLeastSquare = 128;
constexpr std::size_t most_squares(std::size_t rows, std::size_t cols) {
  return (ceil_div(rows, kLeastSquare) + 1) * ceil_div(cols, kLeastSquare);
}

// E4M3 elements with a scale for a square. The products of all the panel's squares are taken once:
// taken for every unit they were a sixth of the time of a product of few rows.
template <class F>
requires(kHasElements<F>&& F::kPerByte == 1 &&
         F::kShape == BlockShape::kSquare) class TileDecoder<F> {
 public:
  static_assert(F::kBlock % kLeastSquare == 0);
  // A matrix of few rows would have more squares than there is room for.
  [[gnu::always_inline]] static bool fits(const DecodeJob& job) {
    return job.weight->packed.matrix_rows == 0;
  }
  [[gnu::always_inline]] TileDecoder(const DecodeJob& job, const WeightArea& area)
      : origin_(job.weight->packed.origin_row()),
        first_row_((origin_ + area.row) / F::kBlock),
        first_col_(area.col / F::kBlock),
        across_(ceil_div(area.cols, F::kBlock)) {
    const PackedView& weight = job.weight->packed;
    const std::size_t stride = ceil_div(weight.cols, F::kBlock);
    const std::size_t down = ceil_div(origin_ + area.row + area.rows, F::kBlock) - first_row_;
    for (std::size_t r = 0; r < down; ++r)
      for (std::size_t c = 0; c < across_; ++c)
        scales_[r * across_ + c] = tile_scale<simd::Amx>(
            F::block_scale(weight, (first_row_ + r) * stride + first_col_ + c));
  }

  struct Unit {
    const simd::Amx::E4m3Scale& scale;
    template <std::size_t g>
    [[gnu::always_inline]] bool fast() const {
      return scale.fast;
    }
    template <std::size_t g>
    [[gnu::always_inline]] __m512i products() const {
      return scale.products;
    }
    template <std::size_t g>
    [[gnu::always_inline]] float value() const {
      return scale.scale;
    }
    template <std::size_t kUnit, class Store>
    [[gnu::always_inline]] void groups(const std::uint8_t* packed, Store store) const {
      e4m3_groups<simd::Amx, kUnit>(packed, *this, store);
    }
  };

  [[gnu::always_inline]] Unit unit(std::size_t row, std::size_t col, std::size_t) const {
    const std::size_t down = (origin_ + row) / F::kBlock - first_row_;
    return {scales_[down * across_ + col / F::kBlock - first_col_]};
  }
  [[gnu::always_inline]] const void* scale_of(std::size_t) const { return scales_; }

 private:
  const std::size_t origin_;                          // rows
  const std::size_t first_row_, first_col_, across_;  // blocks
  simd::Amx::E4m3Scale scales_[kMostSquares];
};

// Fills the tables of a weight whose scales are bytes; false for a format that needs none, and for
// several matrices with a tensor scale each, which no one table serves.
template <class F, class V>
[[gnu::always_inline]] inline bool fill_tables(const PackedView& weight, CodeTables& tables) {
  if (weight.scales.blocks_per_tensor != 0) return false;
  if constexpr (kHasElements<F>) {
    if constexpr (F::kPerByte == 1 && F::kShape == BlockShape::kRow) {
      for (int stored = 0; stored < 256; ++stored) {
        const float scale = e8m0_value(static_cast<std::uint8_t>(stored));
        _mm256_store_si256(reinterpret_cast<__m256i*>(tables.entries[stored]),
                           _mm512_castsi512_si256(V::template e8m0_scale<Bf16>(scale).products));
      }
      return true;
    }
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
