// Formats whose elements are small floating-point numbers (F::Element): the rule chooses a scale
// for the block's largest magnitude, then each element is divided by it and rounded.
#pragma once

#include <bit>
#include <cstring>

#include "base/float_types.h"
#include "formats/runs.h"
#include "kernels/quantize/quantize.h"
#include "simd/scalar.h"

namespace monograph {

inline constexpr std::uint32_t kInfinityBits = 0x7f800000;

template <class V, class T>
[[gnu::always_inline]] inline std::size_t first_nonfinite(const T* in, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i)
    if ((std::bit_cast<std::uint32_t>(to_float(in[i])) & 0x7fffffff) >= kInfinityBits) return i;
  return kAllFinite;
}

// Where a block lies in the input: `rows` pieces of `width` elements, `stride` apart.
struct BlockRectangle {
  std::size_t begin, rows, width, stride;
};

template <class F>
[[gnu::always_inline]] inline BlockRectangle rectangle_of(const QuantizeJob& job,
                                                          std::size_t block) {
  if constexpr (F::kShape != BlockShape::kSquare) {
    return {block * F::kBlock, 1, F::kBlock, 0};
  } else {
    const std::size_t across = ceil_div(job.cols, F::kBlock);
    const std::size_t down = ceil_div(job.matrix_rows, F::kBlock);
    const std::size_t matrix = block / (across * down);
    const std::size_t row = block / across % down * F::kBlock, col = block % across * F::kBlock;
    const std::size_t rows = job.matrix_rows - row, width = job.cols - col;
    return {(matrix * job.matrix_rows + row) * job.cols + col, rows < F::kBlock ? rows : F::kBlock,
            width < F::kBlock ? width : F::kBlock, job.cols};
  }
}

// The code of one element; a NaN counts as 0, an infinity as the largest value.
template <class F>
[[gnu::always_inline]] inline std::uint32_t element_code(float x, const Scaling& scaling) {
  const std::uint32_t a = std::bit_cast<std::uint32_t>(x) & 0x7fffffff;
  if (a > kInfinityBits) return 0;
  return F::Element::encode(a == kInfinityBits ? x : simd::Scalar::scaled(x, scaling));
}

// `width` elements one at a time: tails, and blocks that hold non-finite elements.
template <class F, class V, class T>
[[gnu::always_inline]] inline void encode_one_by_one(const T* in, std::size_t width,
                                                     const Scaling& scaling, std::uint8_t* out) {
  if constexpr (F::kPerByte == 1) {
    for (std::size_t i = 0; i < width; ++i)
      out[i] = static_cast<std::uint8_t>(element_code<F>(to_float(in[i]), scaling));
  } else {
    for (std::size_t i = 0; i < width; i += 2)
      out[i / 2] = static_cast<std::uint8_t>(element_code<F>(to_float(in[i]), scaling) |
                                             element_code<F>(to_float(in[i + 1]), scaling) << 4);
  }
}

template <class F, class V, class T>
[[gnu::always_inline]] inline std::uint32_t largest_finite_bits(const T* in, std::size_t count) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t a = std::bit_cast<std::uint32_t>(to_float(in[i])) & 0x7fffffff;
    if (a < kInfinityBits && a > largest) largest = a;
  }
  return largest;
}

template <class F, class V, class T>
[[gnu::always_inline]] inline std::size_t quantize_element_blocks(const QuantizeJob& job,
                                                                  std::size_t first,
                                                                  std::size_t last) {
  const T* input = static_cast<const T*>(job.input);
  const std::size_t scale_bytes = size_bytes(job.kind);
  RuleContext context = {job.rule, job.kind, {}};
  for (std::size_t block = first; block < last; ++block) {
    if (job.tensors != nullptr) context.tensor = job.tensors[block / job.blocks_per_tensor];
    const BlockRectangle r = rectangle_of<F>(job, block);
    std::uint32_t bits = 0;
    for (std::size_t row = 0; row < r.rows; ++row) {
      const std::uint32_t found = V::absmax_bits(input + r.begin + row * r.stride, r.width);
      bits = found > bits ? found : bits;
    }
    const bool finite = bits < kInfinityBits;
    if (!finite) {
      bits = 0;
      for (std::size_t row = 0; row < r.rows; ++row) {
        const T* in = input + r.begin + row * r.stride;
        if (job.nonfinite == NonFinite::kError) {
          const std::size_t bad = first_nonfinite<V>(in, r.width);
          if (bad != kAllFinite) return r.begin + row * r.stride + bad;
        }
        const std::uint32_t found = largest_finite_bits<F, V>(in, r.width);
        bits = found > bits ? found : bits;
      }
    }
    const BlockScale chosen = F::choose_scale(context, std::bit_cast<float>(bits));
    std::memcpy(job.scales + block * scale_bytes, &chosen.stored, scale_bytes);
    for (std::size_t row = 0; row < r.rows; ++row) {
      const std::size_t at = r.begin + row * r.stride;
      const T* in = input + at;
      std::uint8_t* out = job.values + at / F::kPerByte;
      std::size_t i = 0;
      if (finite)
        for (; i + V::kEncodeAs <= r.width; i += V::kEncodeAs)
          V::template encode_as<typename F::Element>(in + i, chosen.scaling, out + i / F::kPerByte);
      encode_one_by_one<F, V>(in + i, r.width - i, chosen.scaling, out + i / F::kPerByte);
    }
  }
  return kAllFinite;
}

}  // namespace monograph
