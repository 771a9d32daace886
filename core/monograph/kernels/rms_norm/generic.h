// The rows, once for every SIMD vocabulary.
#pragma once

#include "monograph/base/float_types.h"
#include "monograph/kernels/rms_norm/rms_norm.h"
#include "monograph/simd/row_walk.h"

namespace monograph {

// 1 / sqrt(mean + eps) from the sum of squares.
[[gnu::always_inline]] inline float inverse_rms(float squares, std::size_t cols, float eps) {
  return 1.f / __builtin_sqrtf(squares / static_cast<float>(cols) + eps);
}

template <class V, class T, class Y, NormRounding kRounding>
struct RmsNormRows {
  using L = RowLanes<V>;
  using F32 = typename L::F32;
  using W = RowWalk<V>;

  // What the gain multiplies.
  [[gnu::always_inline]] static F32 normed(F32 s, F32 k) {
    if constexpr (kRounding == NormRounding::kBeforeGain)
      return L::template round_as<T>(L::mul(s, k));
    return L::mul(s, k);
  }

  template <bool kResidual>
  [[gnu::always_inline]] static void forward_row(const RmsNormForward& job, std::size_t row) {
    const T* x = static_cast<const T*>(job.x) + row * job.x_stride;
    const T* s = x;
    typename W::Sum squares;
    if constexpr (kResidual) {
      const T* residual = static_cast<const T*>(job.residual) + row * job.residual_stride;
      T* sum = static_cast<T*>(job.sum) + row * job.cols;
      W::each(
          job.cols, [&](std::size_t i, std::size_t k,
                        std::size_t n) __attribute__((always_inline)) {
            const F32 v =
                L::template round_as<T>(L::add(W::load(x + i, n), W::load(residual + i, n)));
            W::store(sum + i, v, n);
            squares.add(k, L::mul(v, v));
          });
      s = sum;
    } else {
      W::each(
          job.cols, [&](std::size_t i, std::size_t k, std::size_t n)
                        __attribute__((always_inline)) {
                          const F32 v = W::load(x + i, n);
                          squares.add(k, L::mul(v, v));
                        });
    }
    const F32 factor = L::set(inverse_rms(squares.total(), job.cols, job.eps));
    Y* y = static_cast<Y*>(job.y) + row * job.cols;
    W::each(
        job.cols, [&](std::size_t i, std::size_t, std::size_t n) __attribute__((always_inline)) {
          const F32 v = normed(W::load(s + i, n), factor);
          W::store(y + i, L::mul(v, W::load(job.gain + i, n)), n);
        });
  }

  [[gnu::always_inline]] static void forward(const RmsNormForward& job, std::size_t begin,
                                             std::size_t end) {
    for (std::size_t row = begin; row < end; ++row) {
      if (job.residual != nullptr)
        forward_row<true>(job, row);
      else
        forward_row<false>(job, row);
    }
  }

  template <bool kSum, bool kGain>
  [[gnu::always_inline]] static void backward_row(const RmsNormBackward& job, std::size_t row,
                                                  float* dgain) {
    const T* x = static_cast<const T*>(job.x) + row * job.x_stride;
    const Y* dy = static_cast<const Y*>(job.dy) + row * job.dy_stride;
    const T* dsum = kSum ? static_cast<const T*>(job.dsum) + row * job.dsum_stride : nullptr;
    T* dx = static_cast<T*>(job.dx) + row * job.cols;
    typename W::Sum squares, dots;
    W::each(
        job.cols, [&](std::size_t i, std::size_t k, std::size_t n) __attribute__((always_inline)) {
          const F32 v = W::load(x + i, n);
          const F32 g = L::mul(W::load(dy + i, n), W::load(job.gain + i, n));
          squares.add(k, L::mul(v, v));
          dots.add(k, L::mul(g, v));
        });
    const float inverse = inverse_rms(squares.total(), job.cols, job.eps);
    // k^3 alone overflows for rows near 0 with a small eps.
    const float along = dots.total() * inverse / static_cast<float>(job.cols) * inverse * inverse;
    const F32 factor = L::set(inverse), slope = L::set(along);
    W::each(
        job.cols, [&](std::size_t i, std::size_t, std::size_t n) __attribute__((always_inline)) {
          const F32 v = W::load(x + i, n), d = W::load(dy + i, n);
          const F32 g = L::mul(d, W::load(job.gain + i, n));
          F32 result = L::sub(L::mul(g, factor), L::mul(v, slope));
          if constexpr (kSum) result = L::add(result, W::load(dsum + i, n));
          W::store(dx + i, result, n);
          if constexpr (kGain)
            W::store(dgain + i, L::add(W::load(dgain + i, n), L::mul(d, normed(v, factor))), n);
        });
  }

  [[gnu::always_inline]] static void backward(const RmsNormBackward& job, std::size_t begin,
                                              std::size_t end, float* dgain) {
    for (std::size_t row = begin; row < end; ++row) {
      if (job.dsum != nullptr && dgain != nullptr)
        backward_row<true, true>(job, row, dgain);
      else if (job.dsum != nullptr)
        backward_row<true, false>(job, row, dgain);
      else if (dgain != nullptr)
        backward_row<false, true>(job, row, dgain);
      else
        backward_row<false, false>(job, row, dgain);
    }
  }
};

template <class V, class T, class Y>
void rms_norm_rows(const RmsNormForward& job, std::size_t begin, std::size_t end) {
  if (job.rounding == NormRounding::kBeforeGain)
    RmsNormRows<V, T, Y, NormRounding::kBeforeGain>::forward(job, begin, end);
  else
    RmsNormRows<V, T, Y, NormRounding::kOnce>::forward(job, begin, end);
}

template <class V, class T, class Y>
void rms_norm_backward_rows(const RmsNormBackward& job, std::size_t begin, std::size_t end,
                            float* dgain) {
  if (job.rounding == NormRounding::kBeforeGain)
    RmsNormRows<V, T, Y, NormRounding::kBeforeGain>::backward(job, begin, end, dgain);
  else
    RmsNormRows<V, T, Y, NormRounding::kOnce>::backward(job, begin, end, dgain);
}

template <class V, class T, class Y>
inline constexpr RmsNormKernels kRmsNormKernels = {rms_norm_rows<V, T, Y>,
                                                   rms_norm_backward_rows<V, T, Y>};

// nullptr if the result has neither the type of x nor float32.
template <class V>
const RmsNormKernels* rms_norm_variant(DType dtype, DType out_dtype) {
  return with_type(
      dtype, [&]<class T>() __attribute__((always_inline))->const RmsNormKernels* {
        if (out_dtype == dtype) return &kRmsNormKernels<V, T, T>;
        return out_dtype == DType::kFloat32 ? &kRmsNormKernels<V, T, float> : nullptr;
      });
}

}  // namespace monograph
