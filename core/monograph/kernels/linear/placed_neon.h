// Parts of rows as vectors of eight floats.
#pragma once

#include "monograph/kernels/linear/few_decode_neon.h"
#include "monograph/kernels/linear/placed_rows.h"

namespace monograph {

template <bool kOfBf16>
struct PlacedParts<FewOrder<simd::Neon, kOfBf16>> {
  using V = simd::Neon;
  using Order = FewOrder<V, kOfBf16>;

  template <bool kBf16>
  [[gnu::always_inline]] static void part(const PartWords& codes, Affine first, Affine second,
                                          DType dtype, float* out) {
    static_assert(kBf16 == kOfBf16);
    std::int8_t bytes[kPart];
    std::memcpy(bytes, &codes, sizeof bytes);
    unrolled<4>([&](auto i) __attribute__((always_inline)) {
      const Affine affine = i < 2 ? first : second;
      const V::Floats x = V::from_int8(vld1_s8(bytes + i * 8), 0);
      const float32x4_t less = vdupq_n_f32(-affine.minimum);
      const V::Floats numbers = {vfmaq_n_f32(less, x.low, affine.scale),
                                 vfmaq_n_f32(less, x.high, affine.scale)};
      Order::L::store(out + i * 8, Order::rounded(numbers, dtype));
    });
  }

  template <bool kBf16>
  [[gnu::always_inline]] static void bytes(const std::uint8_t* p, std::uint8_t flip, int zero,
                                           float scale, DType dtype, float* out) {
    Order::L::store(out, Order::rounded(V::int8_times(p, flip, zero, scale), dtype));
  }

  [[gnu::always_inline]] static void eight_times(std::uint64_t bytes, float d, float* out) {
    const uint16x8_t words = vmovl_u8(vcreate_u8(bytes));
    const V::Floats x = {vcvtq_f32_u32(vmovl_u16(vget_low_u16(words))),
                         vcvtq_f32_u32(vmovl_high_u16(words))};
    Order::L::store(out, V::times(x, d));
  }
  [[gnu::always_inline]] static void eight_signed_times(const std::uint8_t* bytes, float d,
                                                        float* out) {
    const int8x8_t codes = vreinterpret_s8_u8(vld1_u8(bytes));
    Order::L::store(out, V::times(V::from_int8(codes, 0), d));
  }
  [[gnu::always_inline]] static void look_up(const std::uint8_t (&bytes)[16], PartWords& codes) {
    std::uint8_t looked_up[kPart];
    std::memcpy(looked_up, &codes, sizeof looked_up);
    V::lookup_bytes(bytes, looked_up);
    std::memcpy(&codes, looked_up, sizeof looked_up);
  }
};

}  // namespace monograph
