// The algorithm, once, for every format and every SIMD vocabulary.
#pragma once

#include <bit>
#include <cstring>

#include "monograph/base/float_types.h"
#include "monograph/formats/all.h"
#include "monograph/kernels/quantize/element_blocks.h"
#include "monograph/kernels/quantize/group_rows.h"
#include "monograph/kernels/quantize/quantize.h"
#include "monograph/simd/scalar.h"

namespace monograph {

// Midpoints of neighbouring values in fp32, as bitsandbytes computes them; entry 15 is not used.
template <class F>
struct Bounds {
  float values[16];
  constexpr Bounds() : values{} {
    for (int i = 0; i < 15; ++i)
      values[i] = (F::kValues[F::kOrder[i]] + F::kValues[F::kOrder[i + 1]]) / 2.0f;
    values[15] = 2.0f;
  }
};
template <class F>
inline constexpr Bounds<F> kBounds{};

// Below this a scale's reciprocal would overflow; bitsandbytes clamps here.
inline constexpr float kSmallestScale = 1e-38f;

template <class V, class T>
[[gnu::always_inline]] inline std::size_t first_nonfinite(const T* in, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i)
    if ((std::bit_cast<std::uint32_t>(to_float(in[i])) & 0x7fffffff) >= kInfinityBits) return i;
  return kAllFinite;
}

// The value to encode for x under NonFinite::kSaturate, already divided by the scale.
[[gnu::always_inline]] inline float saturated(float x, float inverse) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(x);
  if ((u & 0x7fffffff) > kInfinityBits) return 0.0f;
  if ((u & 0x7fffffff) == kInfinityBits) return u >> 31 ? -1.0f : 1.0f;
  return x * inverse;
}

// A block with non-finite elements, one element at a time.
template <class F, class V, class T>
void quantize_saturated(const T* in, std::size_t count, std::uint8_t* packed, std::uint8_t* scale) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t a = std::bit_cast<std::uint32_t>(to_float(in[i])) & 0x7fffffff;
    if (a < kInfinityBits && a > largest) largest = a;
  }
  std::memcpy(scale, &largest, sizeof largest);
  const float absmax = std::bit_cast<float>(largest);
  const float inverse = 1.0f / (absmax < kSmallestScale ? kSmallestScale : absmax);
  const auto e = simd::Scalar::encoder(kBounds<F>.values, F::kOrder);
  for (std::size_t i = 0; i < count; i += 2) {
    const unsigned even = simd::Scalar::encode_one(e, saturated(to_float(in[i]), inverse));
    const float next = i + 1 < count ? saturated(to_float(in[i + 1]), inverse) : 0.0f;
    packed[i / 2] = static_cast<std::uint8_t>(even << 4 | simd::Scalar::encode_one(e, next));
  }
}

// The last block when the elements do not fill it. bitsandbytes clamps its stored scale and divides
// instead of multiplying with the reciprocal; so do we. An odd count pads with the code of 0.
template <class F, class V, class T>
void quantize_partial(const T* in, std::size_t count, std::uint8_t* packed, std::uint8_t* scale) {
  const float absmax = std::bit_cast<float>(V::absmax_bits(in, count));
  const float divisor = absmax < kSmallestScale ? kSmallestScale : absmax;
  std::memcpy(scale, &divisor, sizeof divisor);
  const auto e = simd::Scalar::encoder(kBounds<F>.values, F::kOrder);
  for (std::size_t i = 0; i < count; i += 2) {
    const unsigned even = simd::Scalar::encode_one(e, to_float(in[i]) / divisor);
    const float next = i + 1 < count ? to_float(in[i + 1]) / divisor : 0.0f;
    packed[i / 2] = static_cast<std::uint8_t>(even << 4 | simd::Scalar::encode_one(e, next));
  }
}

template <class F, class V, class T>
[[gnu::always_inline]] inline std::size_t quantize_absmax_blocks(const QuantizeJob& job,
                                                                 std::size_t first,
                                                                 std::size_t last) {
  const auto encoder = V::encoder(kBounds<F>.values, F::kOrder);
  for (std::size_t block = first; block < last; ++block) {
    const std::size_t begin = block * job.block;
    const std::size_t count = begin + job.block <= job.elements ? job.block : job.elements - begin;
    const T* in = static_cast<const T*>(job.input) + begin;
    std::uint8_t* packed = job.values + begin / 2;
    const std::uint32_t bits = V::absmax_bits(in, count);
    if (bits >= kInfinityBits) {
      if (job.nonfinite == NonFinite::kError) return begin + first_nonfinite<V>(in, count);
      quantize_saturated<F, V>(in, count, packed, job.scales + 4 * block);
      continue;
    }
    if (count < job.block) {
      quantize_partial<F, V>(in, count, packed, job.scales + 4 * block);
      continue;
    }
    const float absmax = std::bit_cast<float>(bits);
    std::memcpy(job.scales + 4 * block, &absmax, sizeof absmax);
    const float inverse = 1.0f / (absmax < kSmallestScale ? kSmallestScale : absmax);
    for (std::size_t i = 0; i < count; i += V::kEncode)
      V::encode(encoder, in + i, inverse, packed + i / 2);
  }
  return kAllFinite;
}

template <class F, class V, class T>
[[gnu::always_inline]] inline std::size_t quantize_blocks(const QuantizeJob& job, std::size_t first,
                                                          std::size_t last) {
  if constexpr (F::kShape == BlockShape::kGroup)
    return quantize_group_rows<F, V, T>(job, first, last);
  else if constexpr (requires { typename F::Element; })
    return quantize_element_blocks<F, V, T>(job, first, last);
  else
    return quantize_absmax_blocks<F, V, T>(job, first, last);
}

template <class F, class V>
std::size_t quantize_with(const QuantizeJob& job, std::size_t first, std::size_t last) {
  return with_type(
      job.dtype, [&]<class T>() __attribute__((always_inline)) {
        return quantize_blocks<F, V, T>(job, first, last);
      });
}

template <class V, class... Fs>
[[gnu::always_inline]] inline QuantizeFn* find_quantize(FormatList<Fs...>, Format format) {
  QuantizeFn* run = nullptr;
  ((format == Fs::kFormat ? void(run = quantize_with<Fs, V>) : void()), ...);
  return run;
}

template <class V>
QuantizeFn* quantize_variant(Format format) {
  QuantizeFn* run = find_quantize<V>(PackedFormats{}, format);
  return run != nullptr ? run : find_quantize<V>(RowFormats{}, format);
}

template <class V>
std::uint32_t absmax_with(DType dtype, const void* input, std::size_t count) {
  return with_type(
      dtype, [&]<class T>() __attribute__((always_inline)) {
        return V::absmax_bits(static_cast<const T*>(input), count);
      });
}

template <class V>
AbsmaxFn* absmax_variant() {
  return absmax_with<V>;
}

}  // namespace monograph
