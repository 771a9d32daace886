// ggml's blocks of 32 elements as floats in places (formats/ggml_blocks.h).
#pragma once

#include "monograph/formats/ggml_blocks.h"
#include "monograph/kernels/linear/placed_rows.h"

namespace monograph {

// One whole block of F: decode<Parts, V, kBf16>(block, dtype, out).
template <class F>
struct PlacedBlock;

inline constexpr float kCodesOfFour[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
inline constexpr float kCodesLessEight[16] = {-8, -7, -6, -5, -4, -3, -2, -1,
                                              0,  1,  2,  3,  4,  5,  6,  7};
inline constexpr float kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                         1,    13,   25,  38,  53,  69,  89,  113};
inline constexpr float kTwiceE2m1Values[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                               0, -1, -2, -3, -4, -6, -8, -12};

[[gnu::always_inline]] inline void subtract_from_bytes(PartWords& codes, int zero) {
  using Bytes = std::uint8_t __attribute__((vector_size(kPart)));
  codes =
      reinterpret_cast<PartWords>(reinterpret_cast<Bytes>(codes) - static_cast<std::uint8_t>(zero));
}

// Sixteen bytes: byte i holds element i below and element i + 16 above. Codes stand for `values`,
// or, where there are no tables, for what take(codes) makes of them.
template <class Parts, bool kBf16, class Take>
[[gnu::always_inline]] inline void placed_halves(const std::uint8_t* p, const float (&values)[16],
                                                 Affine affine, DType dtype, float* out,
                                                 Take take) {
  if constexpr (kHasTables<Parts>) {
    const auto table = Parts::template table<kBf16>(values, affine, dtype);
    Parts::nibbles(p, table, table, out, out + 16);
  } else {
    PartWords codes;
    take_halves(p, codes);
    take(codes);
    Parts::template part<kBf16>(codes, affine, affine, dtype, out);
  }
}

template <>
struct PlacedBlock<Q8_0> {
  template <class Parts, class V, bool kBf16>
  [[gnu::always_inline]] static void decode(const std::uint8_t* block, DType dtype, float* out) {
    if constexpr (kTakesTopBytes<Parts>) {
      const auto scale = Parts::lowered_half(block);
      Parts::template top_bytes<kBf16>(block + 2, scale, dtype, out);
      Parts::template top_bytes<kBf16>(block + 18, scale, dtype, out + 16);
    } else {
      PartWords codes;
      std::memcpy(&codes, block + 2, sizeof codes);
      const Affine affine = {plain_half<V>(block), 0.0f};
      Parts::template part<kBf16>(codes, affine, affine, dtype, out);
    }
  }
};

template <>
struct PlacedBlock<Q4_0> {
  template <class Parts, class V, bool kBf16>
  [[gnu::always_inline]] static void decode(const std::uint8_t* block, DType dtype, float* out) {
    placed_halves<Parts, kBf16>(
        block + 2, kCodesLessEight, {plain_half<V>(block), 0.0f}, dtype, out,
        [](PartWords & codes) __attribute__((always_inline)) { subtract_from_bytes(codes, 8); });
  }
};

template <>
struct PlacedBlock<Q4_1> {
  template <class Parts, class V, bool kBf16>
  [[gnu::always_inline]] static void decode(const std::uint8_t* block, DType dtype, float* out) {
    placed_halves<Parts, kBf16>(block + 4, kCodesOfFour,
                                {plain_half<V>(block), -plain_half<V>(block + 2)}, dtype, out,
                                [](PartWords&) __attribute__((always_inline)){});
  }
};

template <>
struct PlacedBlock<Iq4Nl> {
  template <class Parts, class V, bool kBf16>
  [[gnu::always_inline]] static void decode(const std::uint8_t* block, DType dtype, float* out) {
    placed_halves<Parts, kBf16>(
        block + 2, kIq4Values, {plain_half<V>(block), 0.0f}, dtype, out,
        [](auto& codes) __attribute__((always_inline)) { Parts::look_up(kIq4Bytes, codes); });
  }
};

template <>
struct PlacedBlock<GgmlMxfp4> {
  template <class Parts, class V, bool kBf16>
  [[gnu::always_inline]] static void decode(const std::uint8_t* block, DType dtype, float* out) {
    placed_halves<Parts, kBf16>(
        block + 1, kTwiceE2m1Values, {half_e8m0_at(block), 0.0f}, dtype, out,
        [](auto& codes) __attribute__((always_inline)) { Parts::look_up(kTwiceE2m1Bytes, codes); });
  }
};

template <>
struct PlacedBlock<Q5_0> {
  template <class Parts, class V, bool kBf16>
  [[gnu::always_inline]] static void decode(const std::uint8_t* block, DType dtype, float* out) {
    PartWords codes;
    take_halves(block + 6, codes);
    add_fifth(block + 2, codes);
    subtract_from_bytes(codes, 16);
    const Affine affine = {plain_half<V>(block), 0.0f};
    Parts::template part<kBf16>(codes, affine, affine, dtype, out);
  }
};

template <>
struct PlacedBlock<Q5_1> {
  template <class Parts, class V, bool kBf16>
  [[gnu::always_inline]] static void decode(const std::uint8_t* block, DType dtype, float* out) {
    PartWords codes;
    take_halves(block + 8, codes);
    add_fifth(block + 4, codes);
    const Affine affine = {plain_half<V>(block), -plain_half<V>(block + 2)};
    Parts::template part<kBf16>(codes, affine, affine, dtype, out);
  }
};

// Columns that begin or end within a part go by memory, those within a larger block by a copy.
template <class F, class Order, bool kBf16>
[[gnu::noinline]] void placed_blocks(const LinearWeight& weight, DType dtype, std::size_t first,
                                     std::size_t rows, std::size_t begin, std::size_t count,
                                     float* out, std::size_t stride) {
  using Parts = PlacedParts<Order>;
  using V = typename Order::V;
  if ((begin | count) % kPart != 0)
    return placed_any<ByRows, Order>(weight, dtype, first, rows, begin, count, out, stride);
  const PackedView& packed = weight.packed;
  const std::size_t ahead = packed.odd_values == nullptr ? rows : rows / 2;
  for (std::size_t r = 0; r < rows; ++r) {
    const std::uint8_t* block = packed.row_values(first + r) + begin / F::kBlock * F::kBytes;
    const std::uint8_t* next = block + ahead * packed.row_bytes;  // of the following call, mostly
    float* to = out + r * stride;
    if constexpr (F::kBlock == kPart) {
      for (const float* const end = to + count; to < end; to += kPart) {
        prefetch_far(next);
        PlacedBlock<F>::template decode<Parts, V, kBf16>(block, dtype, to);
        block += F::kBytes;
        next += F::kBytes;
      }
      prefetch_far(next - 1);
      continue;
    }
    for (std::size_t done = 0, skip = begin % F::kBlock; done < count; skip = 0) {
      const std::size_t rest = count - done;
      const std::size_t some = rest < F::kBlock - skip ? rest : F::kBlock - skip;
      for (std::size_t line = 0; line < F::kBytes; line += 64) prefetch_far(next + line);
      if (some == F::kBlock) [[likely]] {
        PlacedBlock<F>::template decode<Parts, V, kBf16>(block, dtype, to + done);
      } else {
        alignas(64) float whole[F::kBlock];
        PlacedBlock<F>::template decode<Parts, V, kBf16>(block, dtype, whole);
        std::memcpy(to + done, whole + skip, some * sizeof(float));
      }
      done += some;
      block += F::kBytes;
      next += F::kBytes;
    }
    prefetch_far(next - 1);
  }
}

}  // namespace monograph
