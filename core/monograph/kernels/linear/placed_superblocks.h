// ggml's blocks of 256 elements as floats in places (formats/ggml_superblocks.h).
#pragma once

#include "monograph/formats/ggml_superblocks.h"
#include "monograph/kernels/linear/placed_blocks.h"

namespace monograph {

// six_bits() of all parts of Q4_K and Q5_K.
struct EightAffines {
  float scales[8], minima[8];
  Affine operator[](std::size_t part) const { return {scales[part], minima[part]}; }
};
template <class Parts, class V>
[[gnu::always_inline]] inline void take_affines(const std::uint8_t* block, EightAffines& out) {
  constexpr std::uint32_t kSix = 0x3f3f3f3f, kFour = 0x0f0f0f0f, kTwo = 0x03030303;
  std::uint32_t a[3];
  std::memcpy(a, block + 4, sizeof a);
  const std::uint64_t scales =
      (a[0] & kSix) | std::uint64_t{(a[2] & kFour) | (a[0] >> 6 & kTwo) << 4} << 32;
  const std::uint64_t minima =
      (a[1] & kSix) | std::uint64_t{(a[2] >> 4 & kFour) | (a[1] >> 6 & kTwo) << 4} << 32;
  Parts::eight_times(scales, plain_half<V>(block), out.scales);
  Parts::eight_times(minima, plain_half<V>(block + 2), out.minima);
}

template <>
struct PlacedBlock<Q4K> {
  template <class Parts, class V, bool kBf16>
  [[gnu::always_inline]] static void decode(const std::uint8_t* block, DType dtype, float* out) {
    EightAffines affines;
    take_affines<Parts, V>(block, affines);
    const std::uint8_t* p = block + 16;
    for (std::size_t i = 0; i < 8; i += 2, p += 32, out += 64) {
      if constexpr (kHasTables<Parts>) {
        const auto low = Parts::template table<kBf16>(kCodesOfFour, affines[i], dtype);
        const auto high = Parts::template table<kBf16>(kCodesOfFour, affines[i + 1], dtype);
        Parts::nibbles(p, low, high, out, out + 32);
        Parts::nibbles(p + 16, low, high, out + 16, out + 48);
      } else {
        unrolled<2>([&](auto half) __attribute__((always_inline)) {
          PartWords codes;
          take_bits(p, half * 4, 15, codes);
          const Affine affine = affines[i + half];
          Parts::template part<kBf16>(codes, affine, affine, dtype, out + half * 32);
        });
      }
    }
  }
};

template <>
struct PlacedBlock<Q5K> {
  template <class Parts, class V, bool kBf16>
  [[gnu::always_inline]] static void decode(const std::uint8_t* block, DType dtype, float* out) {
    EightAffines affines;
    take_affines<Parts, V>(block, affines);
    const std::uint8_t* p = block + 48;
    for (std::size_t i = 0; i < 8; i += 2, p += 32)
      unrolled<2>([&](auto half) __attribute__((always_inline)) {
        PartWords codes;
        take_bits(p, half * 4, 15, codes);
        add_bits(block + 16, i + half, 1, codes);
        const Affine affine = affines[i + half];
        Parts::template part<kBf16>(codes, affine, affine, dtype, out + (i + half) * 32);
      });
  }
};

template <>
struct PlacedBlock<Q6K> {
  template <class Parts, class V, bool kBf16>
  [[gnu::always_inline]] static void decode(const std::uint8_t* block, DType dtype, float* out) {
    float scales[16];
    const float d = plain_half<V>(block + 208);
    Parts::eight_signed_times(block + 192, d, scales);
    Parts::eight_signed_times(block + 200, d, scales + 8);
    for (std::size_t half = 0; half < 2; ++half)
      unrolled<4>([&](auto quarter) __attribute__((always_inline)) {
        PartWords codes;
        take_bits(block + half * 64 + quarter % 2 * 32, quarter / 2 * 4, 15, codes);
        add_bits(block + 128 + half * 32, quarter * 2, 3, codes);
        subtract_from_bytes(codes, 32);
        const std::size_t part = half * 4 + quarter;
        Parts::template part<kBf16>(codes, {scales[2 * part], 0.0f}, {scales[2 * part + 1], 0.0f},
                                    dtype, out + part * 32);
      });
  }
};

template <>
struct PlacedBlock<Iq4Xs> {
  template <class Parts, class V, bool kBf16>
  [[gnu::always_inline]] static void decode(const std::uint8_t* block, DType dtype, float* out) {
    const float d = plain_half<V>(block);
    const unsigned pairs = block[2] | static_cast<unsigned>(block[3]) << 8;
    for (std::size_t part = 0; part < 8; ++part) {
      const unsigned four = block[4 + part / 2] >> (part % 2 * 4) & 15u;
      const int six = static_cast<int>(four | (pairs >> (2 * part) & 3u) << 4);
      placed_halves<Parts, kBf16>(
          block + 8 + part * 16, kIq4Values, {d * static_cast<float>(six - 32), 0.0f}, dtype,
          out + part * 32,
          [](auto& codes) __attribute__((always_inline)) { Parts::look_up(kIq4Bytes, codes); });
    }
  }
};

}  // namespace monograph
