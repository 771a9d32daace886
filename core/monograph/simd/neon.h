// The vocabulary on NEON, with what Armv8.0-A has. A vector is two registers: it holds what one of
// AVX2 does, 32 registers are sixteen vectors, and sums have the order of AVX2's.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "monograph/base/float_types.h"
#include "monograph/base/minifloat.h"
#include "monograph/base/nibbles.h"
#include "monograph/base/scaling.h"
#include "monograph/cpu/tags.h"

namespace monograph::simd {

struct Neon {
  template <class T>
  static constexpr std::size_t kLanes = 32 / sizeof(T);
  struct Floats {
    float32x4_t low, high;
  };
  struct Halves {
    uint16x8_t low, high;
  };
  template <class T>
  using Vec = std::conditional_t<sizeof(T) == 4, Floats, Halves>;
  // Byte k of the sixteen entries is `bytes[k]`.
  template <std::size_t kBytes>
  struct Bytes {
    uint8x16_t bytes[kBytes];
  };
  template <class T>
  using Table = Bytes<sizeof(T)>;
  using Narrow = Scalar;  // for blocks shorter than a vector

  // Round to nearest even in integers; NaN becomes 0x7fc0.
  [[gnu::always_inline]] static uint16x4_t to_bf16(float32x4_t x) {
    const uint32x4_t u = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint32x4_t sum = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), sum, vdupq_n_u32(0x7fc00000)), 16);
  }
  [[gnu::always_inline]] static uint16x4_t to_fp16(float32x4_t x) {
    return vreinterpret_u16_f16(vcvt_f16_f32(x));
  }
  template <class T>
  [[gnu::always_inline]] static uint16x8_t to_halves(Floats x) {
    if constexpr (std::is_same_v<T, Bf16>)
      return vcombine_u16(to_bf16(x.low), to_bf16(x.high));
    else
      return vcombine_u16(to_fp16(x.low), to_fp16(x.high));
  }
  [[gnu::always_inline]] static Floats from_bf16(uint16x8_t bits) {
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16)),
            vreinterpretq_f32_u32(vshll_high_n_u16(bits, 16))};
  }
  [[gnu::always_inline]] static Floats from_fp16(uint16x8_t bits) {
    const float16x8_t halves = vreinterpretq_f16_u16(bits);
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
  }
  // Of eight floats, or of sixteen as 16-bit numbers.
  template <class T, class Eight>
  [[gnu::always_inline]] static Vec<T> from_eights(Eight eight) {
    if constexpr (sizeof(T) == 4)
      return eight(0);
    else
      return {to_halves<T>(eight(0)), to_halves<T>(eight(8))};
  }

  template <class T>
  [[gnu::always_inline]] static Floats load_f32(const T* p) {
    if constexpr (sizeof(T) == 4) {
      return {vld1q_f32(p), vld1q_f32(p + 4)};
    } else {
      const uint16x8_t bits = vld1q_u16(reinterpret_cast<const std::uint16_t*>(p));
      return std::is_same_v<T, Bf16> ? from_bf16(bits) : from_fp16(bits);
    }
  }

  [[gnu::always_inline]] static Floats times(Floats a, float b) {
    return {vmulq_n_f32(a.low, b), vmulq_n_f32(a.high, b)};
  }
  // Every NaN as 0x7fc00000.
  [[gnu::always_inline]] static float32x4_t one_nan(float32x4_t x) {
    const float32x4_t nan = vreinterpretq_f32_u32(vdupq_n_u32(0x7fc00000));
    return vbslq_f32(vceqq_f32(x, x), x, nan);
  }

  [[gnu::always_inline]] static Bytes<2> half_table(uint16x8_t low, uint16x8_t high) {
    const uint8x16_t a = vreinterpretq_u8_u16(low), b = vreinterpretq_u8_u16(high);
    return {{vuzp1q_u8(a, b), vuzp2q_u8(a, b)}};
  }
  [[gnu::always_inline]] static Bytes<4> float_table(Floats low, Floats high) {
    const auto words = [](float32x4_t x) __attribute__((always_inline)) {
      return vreinterpretq_u16_f32(x);
    };
    const auto lower = [&](Floats x) __attribute__((always_inline)) {
      return vuzp1q_u16(words(x.low), words(x.high));
    };
    const auto upper = [&](Floats x) __attribute__((always_inline)) {
      return vuzp2q_u16(words(x.low), words(x.high));
    };
    const Bytes<2> a = half_table(lower(low), lower(high));
    const Bytes<2> b = half_table(upper(low), upper(high));
    return {{a.bytes[0], a.bytes[1], b.bytes[0], b.bytes[1]}};
  }
  [[gnu::always_inline]] static void scaled_values(const float (&values)[16], float scale,
                                                   Floats& low, Floats& high) {
    const float* p = values;
    // Of values that it knows, a compiler negates one half for the other, and with it a NaN's sign.
    asm("" : "+r"(p));
    low = times(load_f32(p), scale);
    high = times(load_f32(p + 8), scale);
  }
  template <class T>
  [[gnu::always_inline]] static Table<T> scaled_table(const float (&values)[16], float scale) {
    Floats low, high;
    scaled_values(values, scale, low, high);
    if constexpr (sizeof(T) == 4)
      return float_table(low, high);
    else
      return half_table(to_halves<T>(low), to_halves<T>(high));
  }

  // The codes of eight bytes, one a byte, in the order of the elements.
  template <Nibbles kNibbles>
  [[gnu::always_inline]] static uint8x16_t nibbles_of(uint8x8_t bytes) {
    const uint8x8_t high = vshr_n_u8(bytes, 4), low = vand_u8(bytes, vdup_n_u8(15));
    const uint8x8x2_t pairs =
        kNibbles == Nibbles::kHighFirst ? vzip_u8(high, low) : vzip_u8(low, high);
    return vcombine_u8(pairs.val[0], pairs.val[1]);
  }
  [[gnu::always_inline]] static Halves lookup_halves(const Bytes<2>& table, uint8x16_t codes) {
    const uint8x16_t low = vqtbl1q_u8(table.bytes[0], codes);
    const uint8x16_t high = vqtbl1q_u8(table.bytes[1], codes);
    return {vreinterpretq_u16_u8(vzip1q_u8(low, high)), vreinterpretq_u16_u8(vzip2q_u8(low, high))};
  }
  [[gnu::always_inline]] static void lookup_floats(const Bytes<4>& table, uint8x16_t codes,
                                                   Floats& first, Floats& second) {
    const Halves lower = lookup_halves({{table.bytes[0], table.bytes[1]}}, codes);
    const Halves upper = lookup_halves({{table.bytes[2], table.bytes[3]}}, codes);
    first = joined(lower.low, upper.low);
    second = joined(lower.high, upper.high);
  }
  // Of 16-bit halves, the upper ones above the lower ones.
  [[gnu::always_inline]] static Floats joined(uint16x8_t low, uint16x8_t high) {
    return {vreinterpretq_f32_u16(vzip1q_u16(low, high)),
            vreinterpretq_f32_u16(vzip2q_u16(low, high))};
  }

  template <class T, Nibbles kNibbles>
  [[gnu::always_inline]] static Vec<T> lookup(const Table<T>& table, const std::uint8_t* packed) {
    if constexpr (sizeof(T) == 4) {
      std::uint32_t four;
      std::memcpy(&four, packed, 4);
      const uint8x16_t codes = nibbles_of<kNibbles>(vcreate_u8(four));
      Floats eight, beyond;
      lookup_floats(table, codes, eight, beyond);
      return eight;
    } else {
      return lookup_halves(table, nibbles_of<kNibbles>(vld1_u8(packed)));
    }
  }

  // By way of fp16, whose subnormals cost nothing and need no flag: E4M3's bits are those of an
  // fp16 number 2^-8 as large.
  [[gnu::always_inline]] static Floats e4m3_times(const std::uint8_t* codes, float scale) {
    const uint16x8_t words = vmovl_u8(vld1_u8(codes));
    const int16x8_t shifted = vshrq_n_s16(vreinterpretq_s16_u16(vshlq_n_u16(words, 8)), 1);
    const Floats exact =
        times(from_fp16(vandq_u16(vreinterpretq_u16_s16(shifted), vdupq_n_u16(0xbfff))), 256.0f);
    const uint16x8_t nan_code = vdupq_n_u16(0x7f);
    const int16x8_t nan = vreinterpretq_s16_u16(vceqq_u16(vandq_u16(words, nan_code), nan_code));
    const float32x4_t one = vreinterpretq_f32_u32(vdupq_n_u32(0x7fc00000));
    const auto mask = [](int32x4_t x) __attribute__((always_inline)) {
      return vreinterpretq_u32_s32(x);
    };
    return times({vbslq_f32(mask(vmovl_s16(vget_low_s16(nan))), one, exact.low),
                  vbslq_f32(mask(vmovl_high_s16(nan)), one, exact.high)},
                 scale);
  }

  template <class T>
  [[gnu::always_inline]] static float e4m3_scale(float scale) {
    return scale;
  }
  template <class T>
  [[gnu::always_inline]] static Vec<T> scaled_e4m3(const std::uint8_t* codes, float scale) {
    return from_eights<T>([&](std::size_t i) __attribute__((always_inline)) {
      return e4m3_times(codes + i, scale);
    });
  }

  // Eight signed codes as floats, exactly.
  [[gnu::always_inline]] static Floats from_int8(int8x8_t codes, int zero) {
    const int16x8_t words = vmovl_s8(codes);
    const int32x4_t less = vdupq_n_s32(zero);
    return {vcvtq_f32_s32(vsubq_s32(vmovl_s16(vget_low_s16(words)), less)),
            vcvtq_f32_s32(vsubq_s32(vmovl_high_s16(words), less))};
  }
  [[gnu::always_inline]] static Floats int8_times(const std::uint8_t* codes, std::uint8_t flip,
                                                  int zero, float scale) {
    const uint8x8_t bytes = veor_u8(vld1_u8(codes), vdup_n_u8(flip));
    return times(from_int8(vreinterpret_s8_u8(bytes), zero), scale);
  }
  template <class T>
  [[gnu::always_inline]] static Vec<T> scaled_int8(const std::uint8_t* codes, std::uint8_t flip,
                                                   int zero, float scale) {
    return from_eights<T>([&](std::size_t i) __attribute__((always_inline)) {
      return int8_times(codes + i, flip, zero, scale);
    });
  }
  template <class T>
  [[gnu::always_inline]] static Vec<T> scaled_int8_less(const std::uint8_t* codes, float scale,
                                                        float minimum) {
    const float32x4_t less = vdupq_n_f32(minimum);
    return from_eights<T>([&](std::size_t i) __attribute__((always_inline)) {
      const Floats x = int8_times(codes + i, 0, 0, scale);
      return Floats{vsubq_f32(x.low, less), vsubq_f32(x.high, less)};
    });
  }

  // The fp16 number at any address.
  [[gnu::always_inline]] static float half_at(const std::uint8_t* p) {
    std::uint16_t bits;
    std::memcpy(&bits, p, sizeof bits);
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits))), 0);
  }

  [[gnu::always_inline]] static void lookup_bytes(const std::uint8_t (&table)[16],
                                                  std::uint8_t* codes) {
    const uint8x16_t sixteen = vld1q_u8(table);
    vst1q_u8(codes, vqtbl1q_u8(sixteen, vld1q_u8(codes)));
    vst1q_u8(codes + 16, vqtbl1q_u8(sixteen, vld1q_u8(codes + 16)));
  }

  template <class T>
  [[gnu::always_inline]] static void store(T* out, Vec<T> v) {
    if constexpr (sizeof(T) == 4) {
      vst1q_f32(out, v.low);
      vst1q_f32(out + 4, v.high);
    } else {
      vst1q_u16(reinterpret_cast<std::uint16_t*>(out), v.low);
      vst1q_u16(reinterpret_cast<std::uint16_t*>(out) + 8, v.high);
    }
  }

  // There is no intrinsic for a store past the caches.
  template <class T>
  [[gnu::always_inline]] static void stream(T* out, Vec<T> v) {
    store(out, v);
  }
  [[gnu::always_inline]] static void stream_end() {}

  [[gnu::always_inline]] static void prefetch(const void* p) { __builtin_prefetch(p); }
  [[gnu::always_inline]] static void prefetch_second(const void* p) { __builtin_prefetch(p, 0, 2); }

  template <class T>
  [[gnu::always_inline]] static std::uint32_t absmax_bits(const T* in, std::size_t count) {
    const uint32x4_t mask = vdupq_n_u32(0x7fffffff);
    uint32x4_t largest = vdupq_n_u32(0);
    std::size_t i = 0;
    for (; i + 8 <= count; i += 8) {
      const Floats x = load_f32(in + i);
      largest = vmaxq_u32(largest, vandq_u32(vreinterpretq_u32_f32(x.low), mask));
      largest = vmaxq_u32(largest, vandq_u32(vreinterpretq_u32_f32(x.high), mask));
    }
    std::uint32_t result = vmaxvq_u32(largest);
    for (; i < count; ++i) {
      const std::uint32_t a = std::bit_cast<std::uint32_t>(to_float(in[i])) & 0x7fffffff;
      result = a > result ? a : result;
    }
    return result;
  }

  struct Encoder {
    const float* bounds;
    uint8x16_t order;
  };
  [[gnu::always_inline]] static Encoder encoder(const float (&bounds)[16],
                                                const std::uint8_t (&order)[16]) {
    return {bounds, vld1q_u8(order)};
  }

  static constexpr std::size_t kEncode = 16;

  template <class T>
  [[gnu::always_inline]] static void encode(const Encoder& e, const T* in, float inverse,
                                            std::uint8_t* packed) {
    const uint8x8_t first = count_below(e, times(load_f32(in), inverse));
    const uint8x8_t second = count_below(e, times(load_f32(in + 8), inverse));
    const uint16x8_t pairs = vreinterpretq_u16_u8(vqtbl1q_u8(e.order, vcombine_u8(first, second)));
    vst1_u8(packed, vmovn_u16(vorrq_u16(vshlq_n_u16(pairs, 4), vshrq_n_u16(pairs, 8))));
  }

  // How many of the fifteen bounds lie below each lane.
  [[gnu::always_inline]] static uint8x8_t count_below(const Encoder& e, Floats v) {
    uint32x4_t low = vdupq_n_u32(0), high = low;
    for (int i = 0; i < 15; ++i) {
      const float32x4_t bound = vdupq_n_f32(e.bounds[i]);
      low = vsubq_u32(low, vcgtq_f32(v.low, bound));
      high = vsubq_u32(high, vcgtq_f32(v.high, bound));
    }
    return vmovn_u16(vcombine_u16(vmovn_u32(low), vmovn_u32(high)));
  }

  static constexpr std::size_t kEncodeAs = 16;

  template <class E, class T>
  [[gnu::always_inline]] static void encode_as(const T* in, const Scaling& s, std::uint8_t* out) {
    const uint8x16_t codes =
        vcombine_u8(eight_codes<E>(load_f32(in), s), eight_codes<E>(load_f32(in + 8), s));
    if constexpr (E::kSignCode == 8) {
      const uint16x8_t pairs = vreinterpretq_u16_u8(codes);
      vst1_u8(out, vmovn_u16(vorrq_u16(pairs, vshrq_n_u16(pairs, 4))));
    } else {
      vst1q_u8(out, codes);
    }
  }
  template <class E>
  [[gnu::always_inline]] static uint8x8_t eight_codes(Floats x, const Scaling& s) {
    return vmovn_u16(
        vcombine_u16(vmovn_u32(codes_of<E>(x.low, s)), vmovn_u32(codes_of<E>(x.high, s))));
  }

  // E::encode() of four scaled elements.
  template <class E>
  [[gnu::always_inline]] static uint32x4_t codes_of(float32x4_t x, const Scaling& s) {
    constexpr int kDropped = 23 - E::kMantissa;
    const float32x4_t factor = vdupq_n_f32(s.factor);
    const float32x4_t quotient = s.divide ? vdivq_f32(x, factor) : vmulq_f32(x, factor);
    const uint32x4_t bits = vreinterpretq_u32_f32(vaddq_f32(quotient, vdupq_n_f32(s.zero)));
    const uint32x4_t a = vandq_u32(bits, vdupq_n_u32(0x7fffffff));
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(a, kDropped), vdupq_n_u32(1));
    const uint32x4_t half = vaddq_u32(odd, vdupq_n_u32((1u << (kDropped - 1)) - 1));
    const uint32x4_t normal = vsubq_u32(vshrq_n_u32(vaddq_u32(a, half), kDropped),
                                        vdupq_n_u32((127u - E::kBias) << E::kMantissa));
    const float32x4_t magnitude = vreinterpretq_f32_u32(a), aligned = vdupq_n_f32(E::kAligned);
    const uint32x4_t small = vsubq_u32(vreinterpretq_u32_f32(vaddq_f32(magnitude, aligned)),
                                       vreinterpretq_u32_f32(aligned));
    const uint32x4_t below = vcltq_f32(magnitude, vdupq_n_f32(E::kSmallestNormal));
    const uint32x4_t code =
        vminq_u32(vbslq_u32(below, small, normal), vdupq_n_u32(E::kLargestCode));
    const uint32x4_t sign =
        vandq_u32(vshrq_n_u32(bits, 32 - std::bit_width(E::kSignCode)), vdupq_n_u32(E::kSignCode));
    return vorrq_u32(code, sign);
  }
};

}  // namespace monograph::simd
