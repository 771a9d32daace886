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

// One pass over a row is one function, not inlined: what a compiler sees of a row at once decides
// how long it takes, with sanitizers minutes.
template <class V, class T, class Y>
struct RmsNormRow {
  using L = RowLanes<V>;
  using F32 = typename L::F32;
  using W = RowWalk<V>;

  // What the gain multiplies.
  template <NormRounding kRounding>
  [[gnu::always_inline]] static F32 normed(F32 s, F32 k) {
    if constexpr (kRounding == NormRounding::kBeforeGain)
      return L::template round_as<T>(L::mul(s, k));
    return L::mul(s, k);
  }

  [[gnu::noinline]] static float squares_of(const T* x, std::size_t cols) {
    typename W::Sum squares;
    W::each(
        cols, [&](std::size_t i, std::size_t k, std::size_t n) __attribute__((always_inline)) {
          const F32 v = W::load(x + i, n);
          squares.add(k, L::mul(v, v));
        });
    return squares.total();
  }
  [[gnu::noinline]] static float add(const T* x, const T* residual, T* sum, std::size_t cols) {
    typename W::Sum squares;
    W::each(
        cols, [&](std::size_t i, std::size_t k, std::size_t n) __attribute__((always_inline)) {
          const F32 v =
              L::template round_as<T>(L::add(W::load(x + i, n), W::load(residual + i, n)));
          W::store_rounded(sum + i, v, n);
          squares.add(k, L::mul(v, v));
        });
    return squares.total();
  }
  template <NormRounding kRounding>
  [[gnu::noinline]] static void scale(const T* s, float inverse, const float* gain, Y* y,
                                      std::size_t cols) {
    const F32 factor = L::set(inverse);
    if constexpr (std::is_same_v<T, Y>) {
      W::each_pair(
          cols, [&](auto at) __attribute__((always_inline)) {
            F32 v[at.kCount], g[at.kCount];
            at.load(s, v);
            at.template load_beside<T>(gain, g);
            for (std::size_t k = 0; k < at.kCount; ++k)
              v[k] = L::mul(normed<kRounding>(v[k], factor), g[k]);
            at.store(y, v);
          });
    } else {
      W::each_alone(
          cols, [&](std::size_t i, std::size_t n) __attribute__((always_inline)) {
            const F32 v = normed<kRounding>(W::load(s + i, n), factor);
            W::store(y + i, L::mul(v, W::load(gain + i, n)), n);
          });
    }
  }

  struct Sums {
    float squares, dots;
  };
  [[gnu::noinline]] static Sums sums_of(const T* x, const Y* dy, const float* gain,
                                        std::size_t cols) {
    typename W::Sum squares, dots;
    W::each(
        cols, [&](std::size_t i, std::size_t k, std::size_t n) __attribute__((always_inline)) {
          const F32 v = W::load(x + i, n);
          const F32 g = L::mul(W::load(dy + i, n), W::load(gain + i, n));
          squares.add(k, L::mul(v, v));
          dots.add(k, L::mul(g, v));
        });
    return {squares.total(), dots.total()};
  }
  template <bool kSum>
  [[gnu::noinline]] static void gradient(const T* x, const Y* dy, const T* dsum, const float* gain,
                                         float inverse, float along, T* dx, std::size_t cols) {
    const F32 factor = L::set(inverse), slope = L::set(along);
    const auto of = [&](F32 v, F32 d, F32 g) __attribute__((always_inline)) {
      return L::sub(L::mul(L::mul(d, g), factor), L::mul(v, slope));
    };
    if constexpr (std::is_same_v<T, Y>) {
      W::each_pair(
          cols, [&](auto at) __attribute__((always_inline)) {
            F32 v[at.kCount], d[at.kCount], g[at.kCount];
            at.load(x, v);
            at.load(dy, d);
            at.template load_beside<T>(gain, g);
            for (std::size_t k = 0; k < at.kCount; ++k) v[k] = of(v[k], d[k], g[k]);
            if constexpr (kSum) {
              at.load(dsum, d);
              for (std::size_t k = 0; k < at.kCount; ++k) v[k] = L::add(v[k], d[k]);
            }
            at.store(dx, v);
          });
    } else {
      W::each_alone(
          cols, [&](std::size_t i, std::size_t n) __attribute__((always_inline)) {
            F32 v = of(W::load(x + i, n), W::load(dy + i, n), W::load(gain + i, n));
            if constexpr (kSum) v = L::add(v, W::load(dsum + i, n));
            W::store(dx + i, v, n);
          });
    }
  }
  template <NormRounding kRounding>
  [[gnu::noinline]] static void add_to_gain(const T* x, const Y* dy, float inverse, float* dgain,
                                            std::size_t cols) {
    const F32 factor = L::set(inverse);
    W::each_alone(
        cols, [&](std::size_t i, std::size_t n) __attribute__((always_inline)) {
          const F32 v = normed<kRounding>(W::load(x + i, n), factor);
          W::store(dgain + i, L::add(W::load(dgain + i, n), L::mul(W::load(dy + i, n), v)), n);
        });
  }
};

template <class V, class T, class Y>
void rms_norm_rows(const RmsNormForward& job, std::size_t begin, std::size_t end) {
  using Row = RmsNormRow<V, T, Y>;
  const auto scale = job.rounding == NormRounding::kBeforeGain
                         ? Row::template scale<NormRounding::kBeforeGain>
                         : Row::template scale<NormRounding::kOnce>;
  for (std::size_t row = begin; row < end; ++row) {
    const T* s = static_cast<const T*>(job.x) + row * job.x_stride;
    float squares = 0.f;
    if (job.residual != nullptr) {
      T* sum = static_cast<T*>(job.sum) + row * job.cols;
      squares = Row::add(s, static_cast<const T*>(job.residual) + row * job.residual_stride, sum,
                         job.cols);
      s = sum;
    } else {
      squares = Row::squares_of(s, job.cols);
    }
    scale(s, inverse_rms(squares, job.cols, job.eps), job.gain,
          static_cast<Y*>(job.y) + row * job.cols, job.cols);
  }
}

template <class V, class T, class Y>
void rms_norm_backward_rows(const RmsNormBackward& job, std::size_t begin, std::size_t end,
                            float* dgain) {
  using Row = RmsNormRow<V, T, Y>;
  const auto add_to_gain = job.rounding == NormRounding::kBeforeGain
                               ? Row::template add_to_gain<NormRounding::kBeforeGain>
                               : Row::template add_to_gain<NormRounding::kOnce>;
  for (std::size_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(job.x) + row * job.x_stride;
    const Y* dy = static_cast<const Y*>(job.dy) + row * job.dy_stride;
    T* dx = static_cast<T*>(job.dx) + row * job.cols;
    const auto sums = Row::sums_of(x, dy, job.gain, job.cols);
    const float inverse = inverse_rms(sums.squares, job.cols, job.eps);
    // k^3 alone overflows for rows near 0 with a small eps.
    const float along = sums.dots * inverse / static_cast<float>(job.cols) * inverse * inverse;
    if (job.dsum != nullptr)
      Row::template gradient<true>(x, dy, static_cast<const T*>(job.dsum) + row * job.dsum_stride,
                                   job.gain, inverse, along, dx, job.cols);
    else
      Row::template gradient<false>(x, dy, nullptr, job.gain, inverse, along, dx, job.cols);
    if (dgain != nullptr) add_to_gain(x, dy, inverse, dgain, job.cols);
  }
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
