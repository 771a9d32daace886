// Rows of a strided tensor to and from packed fp32, for the vector variants.
#pragma once

#include "monograph/documents/heads_view.h"
#include "monograph/kernels/varlen_attention/unit.h"
#include "monograph/simd/lanes.h"

namespace monograph {

// Rows of the packed arrays are whole vectors of every instruction set, zero beyond the data.
[[gnu::always_inline]] inline std::int64_t padded(std::size_t size) {
  return static_cast<std::int64_t>((size + 15) / 16 * 16);
}

template <class V, class T>
[[gnu::always_inline]] inline void widen_row(const T* in, std::int64_t size, std::int64_t width,
                                             float* out) {
  using L = Lanes<V>;
  std::int64_t i = 0;
  for (; i + L::kLanes <= size; i += L::kLanes) L::store(out + i, L::load_as(in + i));
  for (; i < size; ++i) out[i] = to_float(in[i]);
  for (; i < width; ++i) out[i] = 0;
}

template <class V, class T>
[[gnu::always_inline]] inline void narrow_row(const float* in, float factor, std::int64_t size,
                                              T* out) {
  using L = Lanes<V>;
  const typename L::F32 f = L::set(factor);
  std::int64_t i = 0;
  for (; i + L::kLanes <= size; i += L::kLanes) L::store_as(out + i, L::mul(L::load(in + i), f));
  for (; i < size; ++i) out[i] = from_float<T>(in[i] * factor);
}

// Blocks of kTokens rows by kElements, widened and transposed at once; kTokens is 0 where an
// instruction set has nothing for it. Specialised beside the intrinsics.
template <class V, class T>
struct TransposeTokens {
  static constexpr std::int64_t kTokens = 0;
};

// `rows` tokens from `token` on to out[size, columns], transposed; missing columns are zero. `row`
// holds `width` floats.
template <class V, class T>
void widen_transposed(const HeadsView& view, std::int64_t token, std::int64_t rows,
                      std::size_t head, std::int64_t size, std::int64_t columns, float* row,
                      float* out) {
  using Transpose = TransposeTokens<V, T>;
  std::int64_t r = 0;
  if constexpr (Transpose::kTokens > 0) {
    for (; r + Transpose::kTokens <= rows && Transpose::takes(view.token_stride);
         r += Transpose::kTokens) {
      const T* const from = row_of<T>(view, token + r, head);
      std::int64_t i = 0;
      for (; i + Transpose::kElements <= size; i += Transpose::kElements)
        Transpose::run(from + i, view.token_stride, out + i * columns + r, columns);
      for (; i < size; ++i)
        for (std::int64_t t = 0; t < Transpose::kTokens; ++t)
          out[i * columns + r + t] = to_float(from[t * view.token_stride + i]);
    }
  }
  for (; r < columns; ++r) {
    if (r < rows) widen_row<V>(row_of<T>(view, token + r, head), size, size, row);
    for (std::int64_t i = 0; i < size; ++i) out[i * columns + r] = r < rows ? row[i] : 0.f;
  }
}

// Whether a NaN or an infinity is among `count` floats, a multiple of the lanes: 0 times it is NaN.
template <class V>
[[gnu::always_inline]] inline bool any_nonfinite(const float* p, std::int64_t count) {
  using L = Lanes<V>;
  typename L::F32 sum = L::set(0.f);
  for (std::int64_t i = 0; i < count; i += L::kLanes)
    sum = L::fma(L::load(p + i), L::set(0.f), sum);
  const float total = L::reduce_add(sum);
  return !(total == total);
}

template <class V>
[[gnu::always_inline]] inline void clear_floats(float* p, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) p[i] = 0;
}

}  // namespace monograph
