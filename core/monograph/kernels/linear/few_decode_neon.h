// Eight weights a vector, in registers from the packed bytes on.
#pragma once

#include "monograph/kernels/linear/few_decode.h"
#include "monograph/simd/lanes_neon.h"
#include "monograph/simd/transpose_neon.h"

namespace monograph {

// In order: to widen 16 bits takes one instruction for four elements, whichever they are.
template <bool kBf16>
struct FewOrder<simd::Neon, kBf16> {
  using V = simd::Neon;
  using L = Lanes<V>;
  using F32 = L::F32;

  static constexpr std::size_t kTerms = 1;
  [[gnu::always_inline]] static F32 add_products(F32 x, F32 w, F32 sum) {
    return L::fma(x, w, sum);
  }
  static constexpr std::size_t place(std::size_t element) { return element; }
  [[gnu::always_inline]] static F32 to_places(F32 x) { return x; }
  [[gnu::always_inline]] static F32 from_places(F32 x) { return x; }

  [[gnu::always_inline]] static F32 rounded(F32 x, DType dtype) {
    if constexpr (kBf16)
      return V::from_bf16(V::to_halves<Bf16>(x));
    else
      return dtype == DType::kFloat16 ? V::from_fp16(V::to_halves<Fp16>(x)) : x;
  }
  [[gnu::always_inline]] static F32 one_nan(F32 x) {
    return {V::one_nan(x.low), V::one_nan(x.high)};
  }
  [[gnu::always_inline]] static void transpose(F32 (&v)[8]) { transpose_8x8(v); }
  [[gnu::always_inline]] static F32 e4m3(const std::uint8_t* p) { return V::e4m3_times(p, 1.0f); }
  [[gnu::always_inline]] static F32 e8m0(const std::uint8_t* p) {
    const uint16x8_t bytes = vmovl_u8(vld1_u8(p));
    return {e8m0(vmovl_u16(vget_low_u16(bytes))), e8m0(vmovl_high_u16(bytes))};
  }

 private:
  // As e8m0_value().
  [[gnu::always_inline]] static float32x4_t e8m0(uint32x4_t bytes) {
    const uint32x4_t finite =
        vbslq_u32(vceqzq_u32(bytes), vdupq_n_u32(0x00400000), vshlq_n_u32(bytes, 23));
    const uint32x4_t nan = vceqq_u32(bytes, vdupq_n_u32(kE8m0NaN));
    return vreinterpretq_f32_u32(vbslq_u32(nan, vdupq_n_u32(0x7fc00000), finite));
  }
};
template <class T>
struct FewOrderOf<simd::Neon, T> {
  using Type = FewOrder<simd::Neon, std::is_same_v<T, Bf16>>;
};

// Four bits to bf16: sixteen weights from eight bytes by two byte lookups.
template <class F>
requires(F::kPerByte == 2) struct FewDecoder<F, FewOrder<simd::Neon, true>> {
  static constexpr std::size_t kTogether = 2;
  using V = simd::Neon;
  using Prepared = V::Table<Bf16>;

  [[gnu::always_inline]] static void prepare(FewNumbers<F> numbers, DType dtype,
                                             const std::uint8_t*, Prepared& out) {
    static_cast<void>(dtype);  // bf16
    const auto [values, scale] = sixteen_values<F>(numbers);
    out = V::scaled_table<Bf16>(values, scale);
  }
  [[gnu::always_inline]] static void decode(const Prepared& table, const std::uint8_t* p,
                                            V::Floats (&w)[2]) {
    const V::Halves sixteen = V::lookup_halves(table, V::nibbles_of<F::kNibbles>(vld1_u8(p)));
    w[0] = V::from_bf16(sixteen.low);
    w[1] = V::from_bf16(sixteen.high);
  }
};

// Four bits to fp32 and fp16: by four byte lookups.
template <class F>
requires(F::kPerByte == 2) struct FewDecoder<F, FewOrder<simd::Neon, false>> {
  static constexpr std::size_t kTogether = 2;
  using V = simd::Neon;
  using Order = FewOrder<V, false>;
  using Prepared = V::Table<float>;

  [[gnu::always_inline]] static void prepare(FewNumbers<F> numbers, DType dtype,
                                             const std::uint8_t*, Prepared& out) {
    const auto [values, scale] = sixteen_values<F>(numbers);
    V::Floats low, high;
    V::scaled_values(values, scale, low, high);
    out = V::float_table(Order::rounded(low, dtype), Order::rounded(high, dtype));
  }
  [[gnu::always_inline]] static void decode(const Prepared& table, const std::uint8_t* p,
                                            V::Floats (&w)[2]) {
    V::lookup_floats(table, V::nibbles_of<F::kNibbles>(vld1_u8(p)), w[0], w[1]);
  }
};

// E4M3.
template <class F, bool kBf16>
requires(F::kPerByte == 1) struct FewDecoder<F, FewOrder<simd::Neon, kBf16>> {
  static constexpr std::size_t kTogether = 1;
  using Order = FewOrder<simd::Neon, kBf16>;
  struct Prepared {
    float scale;
    DType dtype;
  };

  [[gnu::always_inline]] static void prepare(float scale, DType dtype, const std::uint8_t*,
                                             Prepared& out) {
    out = {scale, dtype};
  }
  [[gnu::always_inline]] static void decode(const Prepared& unit, const std::uint8_t* p,
                                            simd::Neon::Floats (&w)[1]) {
    w[0] = Order::rounded(simd::Neon::e4m3_times(p, unit.scale), unit.dtype);
  }
};

}  // namespace monograph
