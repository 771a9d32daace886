// 16-bit floats as storage types, with bit-exact scalar conversions. Kernels use these for tails
// and the scalar instruction set; every SIMD conversion must agree with them on all inputs.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "monograph/base/dtype.h"

namespace monograph {

struct Bf16 {
  std::uint16_t bits;
};
struct Fp16 {
  std::uint16_t bits;
};
static_assert(sizeof(Bf16) == 2 && sizeof(Fp16) == 2);

// Unaligned loads: checkpoints are mapped at any byte offset.
[[gnu::always_inline]] inline float load_f32(const void* p) {
  float x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

[[gnu::always_inline]] inline float to_float(float x) { return x; }

[[gnu::always_inline]] inline float to_float(Bf16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

[[gnu::always_inline]] inline float to_float(Fp16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000) << 16;
  const std::uint32_t rest = x.bits & 0x7fff;
  if (rest >= 0x7c00) {  // inf or NaN: quiet, as VCVTPH2PS does
    const std::uint32_t quiet = rest > 0x7c00 ? 0x400000 : 0;
    return std::bit_cast<float>(sign | 0x7f800000 | (rest & 0x3ff) << 13 | quiet);
  }
  if (rest >= 0x400) return std::bit_cast<float>(sign | ((rest << 13) + 0x38000000));
  // Subnormal: rest * 2^-24 is exact in fp32.
  const float magnitude = static_cast<float>(rest) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
}

template <class T>
T from_float(float x);

template <>
[[gnu::always_inline]] inline float from_float<float>(float x) {
  return x;
}

// Round to nearest even, subnormals kept; every NaN becomes 0x7fc0, as in torch.
template <>
[[gnu::always_inline]] inline Bf16 from_float<Bf16>(float x) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(x);
  if ((u & 0x7fffffff) > 0x7f800000) return {0x7fc0};
  return {static_cast<std::uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}

// Round to nearest even, subnormals kept, overflow to infinity; NaN keeps its sign and upper
// payload and is quiet: the rule of VCVTPS2PH.
template <>
[[gnu::always_inline]] inline Fp16 from_float<Fp16>(float x) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (u >> 16) & 0x8000;
  const std::uint32_t a = u & 0x7fffffff;
  std::uint32_t half;
  if (a > 0x7f800000) {
    half = 0x7e00 | ((a >> 13) & 0x3ff);
  } else if (a >= 0x47800000) {  // 65536 and above, infinity included
    half = 0x7c00;
  } else if (a >= 0x38800000) {  // normal; a carry out of the mantissa rounds 65520 up to infinity
    half = (a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13;
  } else {
    // Adding 0.5 aligns the last bit of the sum with 2^-24, so the addition itself rounds to even.
    const float sum = std::bit_cast<float>(a) + 0.5f;
    half = std::bit_cast<std::uint32_t>(sum) - 0x3f000000;
  }
  return {static_cast<std::uint16_t>(sign | half)};
}

template <class T>
inline constexpr DType dtype_of = DType::kFloat32;
template <>
inline constexpr DType dtype_of<Bf16> = DType::kBFloat16;
template <>
inline constexpr DType dtype_of<Fp16> = DType::kFloat16;

// body.template operator()<T>() for the storage type T of `dtype`.
template <class Body>
[[gnu::always_inline]] inline decltype(auto) with_type(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kBFloat16:
      return body.template operator()<Bf16>();
    case DType::kFloat16:
      return body.template operator()<Fp16>();
    case DType::kFloat32:
      break;
  }
  return body.template operator()<float>();
}

}  // namespace monograph
