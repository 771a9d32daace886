// What the kernels for few rows ask of a vocabulary: the weights of a packed row as vectors of
// floats in registers. A decoded vector may hold its elements in another order than memory, its
// *places*; the left operand is packed in the same order, and sums are put back before lanes meet.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "monograph/base/float_types.h"
#include "monograph/formats/runs.h"
#include "monograph/kernels/linear/elements.h"
#include "monograph/kernels/linear/few_int4.h"
#include "monograph/simd/unrolled.h"

namespace monograph {

// How V decodes for activations of type T. Types that differ in the rounding of a scaled table
// alone share an order, and so the kernels: the rounding is chosen at run time, once a unit.
template <class V, class T>
struct FewOrderOf;

// Specialised for each vocabulary V; kHalves where it has two. An order has:
//   L                     lanes to compute with
//   V                     the vocabulary
//   place(i)              where element i stands
//   to_places(x)          a vector in memory's order, in that of decoded ones
//   from_places(x)        and back
//   rounded(x, dtype)     x rounded to the type, as floats
//   e4m3(p), e8m0(p)      a vector of scales, stored as bytes
//   one_nan(x)            every NaN as 0x7fc00000
//   transpose(v)          as many vectors as there are lanes, rows to columns
//   kTerms                of the reduction in a word of the left operand and of the weight: 1, or 2
//   add_products(x, w, sum)   in each lane, to a sum those of a word's terms
//   kTerms                terms of the reduction in a word, 32 bits of an operand: 1, or 2 of bf16
//   add_products(x, w, sum)   sum and in each lane the products of the terms of two words
template <class V, bool kHalves = false>
struct FewOrder;

// A weight that is not packed, with elements of type S.
template <class S>
struct PlainOf {
  static constexpr Format kFormat = Format::kPlain;
};
template <class F>
inline constexpr bool kIsPlain = false;
template <class S>
inline constexpr bool kIsPlain<PlainOf<S>> = true;

// What decodes rows of F where units do not fit.
template <class F>
using RowsOf = std::conditional_t<std::is_same_v<F, Int4Units>, ByRows, F>;

// Whether F is decoded in registers; else rows go through memory.
template <class F>
inline constexpr bool kInRegisters = !std::is_same_v<F, ByRows>;

// Elements of a row of F that share a scale, as the kernels walk through them: the block, or 64
// where the block is chosen with the weight.
template <class F>
inline constexpr std::size_t kFewUnit = F::kBlock == 0 ? 64 : F::kBlock;
template <class S>
inline constexpr std::size_t kFewUnit<PlainOf<S>> = 64;
template <>
inline constexpr std::size_t kFewUnit<ByRows> = 64;
template <>
inline constexpr std::size_t kFewUnit<Int4Units> = Int4Units::kUnit;

// The numbers of a unit: its scale, for int4 the zero point too.
template <class F>
using FewNumbers = std::conditional_t<std::is_same_v<F, Int4Units>, ScaleAndZero, float>;

// A unit of four bits: its sixteen values, and what they are multiplied by.
struct SixteenValues {
  const float (&values)[16];
  float scale;
};
template <class F>
[[gnu::always_inline]] inline SixteenValues sixteen_values(float scale) {
  return {F::kValues, scale};
}
template <class F>
[[gnu::always_inline]] inline SixteenValues sixteen_values(ScaleAndZero numbers) {
  return {reinterpret_cast<const float(&)[16]>(Int4::kDifferences[15 - numbers.zero]),
          numbers.scale};
}

// The decoder of a format, specialised for each order:
//   kTogether             vectors that are decoded at a time
//   Prepared              what the elements of a unit have in common
//   prepare(numbers, dtype, p, out)  for the unit whose first byte is p
//   decode(prepared, p, w)         kTogether vectors from p on
template <class F, class Order>
struct FewDecoder;

template <class S, class Order>
struct FewDecoder<PlainOf<S>, Order> {
  static constexpr std::size_t kTogether = 1;
  struct Prepared {};
  [[gnu::always_inline]] static void prepare(float, DType, const std::uint8_t*, Prepared&) {}
  [[gnu::always_inline]] static void decode(const Prepared&, const std::uint8_t* p,
                                            typename Order::L::F32 (&w)[1]) {
    w[0] = Order::to_places(Order::L::load_as(reinterpret_cast<const S*>(p)));
  }
};

// Bytes of `count` elements.
template <class F>
struct FewBytes {
  static constexpr std::size_t of(std::size_t count) { return count / F::kPerByte; }
};
template <class S>
struct FewBytes<PlainOf<S>> {
  static constexpr std::size_t of(std::size_t count) { return count * sizeof(S); }
};
template <class F>
[[gnu::always_inline]] constexpr std::size_t few_bytes(std::size_t count) {
  return FewBytes<F>::of(count);
}

// F, or for a weight that is not packed that of activations of type T.
template <class F, class T>
using Decoded = std::conditional_t<std::is_same_v<F, Plain>, PlainOf<T>, F>;

// Whether column `col` of every row begins a unit that the decoder knows.
template <class F>
[[gnu::always_inline]] inline bool begins_with_units(const LinearWeight& weight, std::size_t col,
                                                     DType dtype) {
  const PackedView& packed = weight.packed;
  if constexpr (!kInRegisters<F>)
    return false;
  else if constexpr (kIsPlain<F>)
    return weight.dtype == dtype;
  else if constexpr (F::kShape == BlockShape::kGroup)
    return (packed.block | col) % kFewUnit<F> == 0;
  else if constexpr (F::kShape == BlockShape::kFlat)
    return ((packed.origin | packed.cols | packed.block | col) % kFewUnit<F>) == 0;
  else
    return col % kFewUnit<F> == 0;
}

// Of blocks [first, first + count) of one row, as block_scale() gives them; every NaN the same.
template <class F, class Order>
[[gnu::always_inline]] inline void byte_scales(const PackedView& weight, std::size_t first,
                                               std::size_t count, float* out) {
  using L = typename Order::L;
  const ScalesView& scales = weight.scales;
  std::size_t i = 0;
  if constexpr (F::kFormat != Format::kNvfp4) {
    for (; i + L::kLanes <= count; i += L::kLanes)
      L::store(out + i, Order::e8m0(scales.blocks + first + i));
    for (; i < count; ++i) out[i] = F::block_scale(weight, first + i);
  } else {
    const std::size_t matrix = scales.blocks_per_tensor == 0 ? 0 : first / scales.blocks_per_tensor;
    const float tensor = scales.tensor == nullptr ? 1.0f : load_f32(scales.tensor + 4 * matrix);
    const auto t = L::set(tensor);
    for (; i + L::kLanes <= count; i += L::kLanes) {
      const auto s = Order::e4m3(scales.blocks + first + i);
      L::store(out + i, Order::one_nan(scales.tensor_divides ? L::div(s, t) : L::mul(s, t)));
    }
    for (; i < count; ++i) {
      const float s = F::block_scale(weight, first + i);
      out[i] = s != s ? std::bit_cast<float>(0x7fc00000u) : s;
    }
  }
}

// Of `units` units from (row, col) on, where one begins. May write up to a vector behind.
template <class F, class Order>
[[gnu::always_inline]] inline void unit_numbers(const PackedView& weight, std::size_t row,
                                                std::size_t col, std::size_t units,
                                                FewNumbers<F>* out) {
  using L = typename Order::L;
  if constexpr (kIsPlain<F>) {
    return;
  } else if constexpr (F::kShape == BlockShape::kGroup) {
    group_units<Order>(weight, row, 1, col, units, out, 0);
  } else if constexpr (F::kShape == BlockShape::kRow) {
    byte_scales<F, Order>(weight, weight.element(row, col) / F::kBlock, units, out);
  } else if constexpr (F::kShape == BlockShape::kSquare) {
    const std::size_t first = square_block(weight, row, col);
    for (std::size_t i = 0; i < units; ++i) out[i] = F::block_scale(weight, first + i);
  } else {
    constexpr std::size_t kUnit = kFewUnit<F>;
    const ScalesView& scales = weight.scales;
    const std::size_t element = weight.element(row, col), first = element / kUnit;
    if (weight.block != kUnit || !scales.double_quantised()) {
      for (std::size_t i = 0; i < units; ++i)
        out[i] = F::block_scale(weight, (element + i * kUnit) / weight.block);
      return;
    }
    // Two roundings, as absmax_scale().
    for (std::size_t i = 0; i < units;) {
      const std::size_t group = (first + i) / kScaleGroup;
      const std::size_t stop =
          units < (group + 1) * kScaleGroup - first ? units : (group + 1) * kScaleGroup - first;
      const float factor = load_f32(scales.groups + 4 * group);
      for (std::size_t j = i; j < stop; ++j)
        out[j] = load_f32(scales.map + 4 * static_cast<std::size_t>(scales.blocks[first + j]));
      if (stop - i < L::kLanes / 2) {  // a vector would wait for these stores
        for (; i < stop; ++i) {
          const float product = out[i] * factor;
          out[i] = product + scales.offset;
        }
        continue;
      }
      const auto f = L::set(factor), offset = L::set(scales.offset);
      for (std::size_t j = i; j < stop; j += L::kLanes)
        L::store(out + j, L::add(L::mul(L::load(out + j), f), offset));
      i = stop;
    }
  }
}

// The same of `rows` rows, `stride` apart. Not inlined: the kernels of all numbers of rows share
// it.
template <class F, class Order>
[[gnu::noinline]] void unit_numbers(const PackedView& weight, std::size_t row, std::size_t rows,
                                    std::size_t col, std::size_t units, FewNumbers<F>* out,
                                    std::size_t stride) {
  if constexpr (std::is_same_v<F, Int4Units>)
    group_units<Order>(weight, row, rows, col, units, out, stride);
  else
    for (std::size_t r = 0; r < rows; ++r)
      unit_numbers<F, Order>(weight, row + r, col, units, out + r * stride);
}

// The scales of (row, col), if they lie in the order of the elements.
template <class F>
[[gnu::always_inline]] inline void prefetch_scales(const PackedView& weight, std::size_t row,
                                                   std::size_t col) {
  if constexpr (!kIsPlain<F>) {
    const std::uint8_t* const blocks = weight.scales.blocks;
    const std::size_t element = weight.element(row, col);
    if constexpr (F::kShape == BlockShape::kFlat)
      __builtin_prefetch(blocks +
                         element / kFewUnit<F> * (weight.scales.double_quantised() ? 1 : 4));
    else if constexpr (F::kShape == BlockShape::kRow)
      __builtin_prefetch(blocks + element / F::kBlock);
    else if constexpr (F::kShape == BlockShape::kGroup)
      group_prefetch(weight, row, col);
  }
}

// store(i, vector) for the vectors of `count` elements from (row, col) on, whole units.
template <class F, class Order, class Store>
[[gnu::always_inline]] inline void decode_units(const PackedView& weight, std::size_t row,
                                                std::size_t col, std::size_t count, DType dtype,
                                                FewNumbers<F>* numbers, Store store) {
  using Decoder = FewDecoder<F, Order>;
  constexpr std::size_t kUnit = kFewUnit<F>, kVectors = kUnit / Order::L::kLanes;
  constexpr std::size_t kTogether = Decoder::kTogether;
  unit_numbers<F, Order>(weight, row, col, count / kUnit, numbers);
  const std::uint8_t* p = weight.values + few_bytes<F>(weight.element(row, col));
  for (std::size_t u = 0; u < count / kUnit; ++u, p += few_bytes<F>(kUnit)) {
    typename Decoder::Prepared prepared;
    Decoder::prepare(numbers[u], dtype, p, prepared);
    unrolled<kVectors / kTogether>([&](auto g) __attribute__((always_inline)) {
      typename Order::L::F32 w[kTogether];
      Decoder::decode(prepared, p + few_bytes<F>(g * kTogether * Order::L::kLanes), w);
      unrolled<kTogether>([&](auto t) __attribute__((always_inline)) {
        store(u * kVectors + g * kTogether + t, w[t]);
      });
    });
  }
}

}  // namespace monograph
