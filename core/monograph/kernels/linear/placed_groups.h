// Formats with groups of a row as floats in places (formats/row_groups.h).
#pragma once

#include "monograph/kernels/linear/placed_rows.h"

namespace monograph {

// Where a run of one group begins, and what the next call reads there.
struct GroupBytes {
  const std::uint8_t* now;
  const std::uint8_t* next;
};

// The whole steps of a run of `count` elements: returns how many elements it has decoded. kPerByte
// elements a byte.
template <class F>
struct PlacedGroup;

template <>
struct PlacedGroup<Int8> {
  static constexpr std::size_t kPerByte = 1;
  template <class Order, bool kBf16>
  [[gnu::always_inline]] static std::size_t decode(GroupBytes p, std::size_t count, float scale,
                                                   Int8::Zero zero, DType dtype, float* out) {
    using Parts = PlacedParts<Order>;
    constexpr std::size_t kLanes = Order::L::kLanes, kLine = 64;
    std::size_t i = 0;
    if constexpr (kTakesTopBytes<Parts>)
      if (zero.flip == 0 && zero.value == 0 &&
          !(scale < Parts::kLeastScale && scale > -Parts::kLeastScale)) {
        const auto lowered = Parts::lowered(scale);
        for (; i + kLine <= count; i += kLine) {
          prefetch_far(p.next + i);
          unrolled<kLine / kLanes>([&](auto v) __attribute__((always_inline)) {
            const std::size_t at = i + v * kLanes;
            Parts::template top_bytes<kBf16>(p.now + at, lowered, dtype, out + at);
          });
        }
      }
    for (; i + kLanes <= count; i += kLanes) {
      if (i % kLine == 0) prefetch_far(p.next + i);
      Parts::template bytes<kBf16>(p.now + i, zero.flip, zero.value, scale, dtype, out + i);
    }
    return i;
  }
};

// Vectors of `count` elements from p on by the decoder of registers.
template <class Units, class Order, std::size_t kCount>
[[gnu::always_inline]] inline void placed_vectors(
    const typename FewDecoder<Units, Order>::Prepared& prepared, const std::uint8_t* p,
    float* out) {
  using L = typename Order::L;
  constexpr std::size_t kTogether = FewDecoder<Units, Order>::kTogether;
  unrolled<kCount / L::kLanes / kTogether>([&](auto g) __attribute__((always_inline)) {
    constexpr std::size_t at = g * kTogether * L::kLanes;
    typename L::F32 w[kTogether];
    FewDecoder<Units, Order>::decode(prepared, p + few_bytes<Units>(at), w);
    unrolled<kTogether>([&](auto t) __attribute__((always_inline)) {
      L::store(out + at + t * L::kLanes, w[t]);
    });
  });
}

template <>
struct PlacedGroup<Int4> {
  static constexpr std::size_t kPerByte = 2;
  template <class Order, bool>
  [[gnu::always_inline]] static std::size_t decode(GroupBytes p, std::size_t count, float scale,
                                                   int zero, DType dtype, float* out) {
    constexpr std::size_t kStep = 32;
    typename FewDecoder<Int4Units, Order>::Prepared table;
    FewDecoder<Int4Units, Order>::prepare({scale, zero}, dtype, p.now, table);
    std::size_t i = 0;
    for (; i + kStep <= count; i += kStep) {
      prefetch_far(p.next + i / 2);
      placed_vectors<Int4Units, Order, kStep>(table, p.now + i / 2, out + i);
    }
    return i;
  }
};

// E4M3, a unit at a time.
struct Fp8Units {
  static constexpr Format kFormat = Fp8Row::kFormat;
  static constexpr BlockShape kShape = BlockShape::kGroup;
  static constexpr std::size_t kBlock = 0, kPerByte = 1;
};
template <>
struct PlacedGroup<Fp8Row> {
  static constexpr std::size_t kPerByte = 1;
  template <class Order, bool>
  [[gnu::always_inline]] static std::size_t decode(GroupBytes p, std::size_t count, float scale,
                                                   Fp8Row::NoZero, DType dtype, float* out) {
    constexpr std::size_t kUnit = kFewUnit<Fp8Units>;
    std::size_t i = 0;
    for (; i + kUnit <= count; i += kUnit) {
      typename FewDecoder<Fp8Units, Order>::Prepared prepared;
      prefetch_far(p.next + i);
      FewDecoder<Fp8Units, Order>::prepare(scale, dtype, p.now + i, prepared);
      placed_vectors<Fp8Units, Order, kUnit>(prepared, p.now + i, out + i);
    }
    return i;
  }
};

// What is left of a group after whole steps, and what follows it in the row, goes by memory.
template <class F, class Order, bool kBf16>
[[gnu::noinline]] void placed_groups(const LinearWeight& weight, DType dtype, std::size_t first,
                                     std::size_t rows, std::size_t begin, std::size_t count,
                                     float* out, std::size_t stride) {
  constexpr std::size_t kLanes = Order::L::kLanes, kPerByte = PlacedGroup<F>::kPerByte;
  const PackedView& packed = weight.packed;
  const std::size_t groups = packed.cols / packed.block, end = begin + count;
  for (std::size_t r = 0; r < rows; ++r) {
    const std::size_t row = first + r + packed.origin_row();
    const std::uint8_t* const values = packed.values + row * packed.row_bytes;
    float* const to = out + r * stride;
    const std::uint8_t* const next = values + rows * packed.row_bytes;
    prefetch_far(next + end / kPerByte - 1);
    std::size_t col = begin, group = begin / packed.block;
    for (; col < end && col % kPerByte == 0 && (col - begin) % kLanes == 0; ++group) {
      const std::size_t last = (group + 1) * packed.block, stop = last < end ? last : end;
      const std::size_t done = PlacedGroup<F>::template decode<Order, kBf16>(
          {values + col / kPerByte, next + col / kPerByte}, stop - col,
          group_scale(packed.scales, row * groups + group), F::zero_of(packed, row, group), dtype,
          to + (col - begin));
      col += done;
      if (col != stop) break;
    }
    if (col != end)
      placed_any<ByRows, Order>(weight, dtype, first + r, 1, col, end - col, to + (col - begin),
                                stride);
  }
}

}  // namespace monograph
