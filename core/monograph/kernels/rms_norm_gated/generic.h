// The rows, once for every SIMD vocabulary.
#pragma once

#include "monograph/base/float_types.h"
#include "monograph/kernels/gated_activation/activations.h"
#include "monograph/kernels/rms_norm_gated/rms_norm_gated.h"
#include "monograph/simd/row_walk.h"

namespace monograph {

// s = 1 / (1 + e^-x), and its slope s (1 - s), where 1 - s = e^-x s; e^-x may be infinite.
template <class V>
struct Sigmoid {
  using L = RowLanes<V>;
  using F32 = typename L::F32;

  template <class T>
  [[gnu::always_inline]] static F32 value(F32 x) {
    return L::div(L::set(1.f), L::add(L::set(1.f), exp_of_minus<V>(x)));
  }
  template <class T>
  [[gnu::always_inline]] static ValueAndSlope<F32> with_slope(F32 x) {
    const F32 e = exp_of_minus<V>(x), s = L::div(L::set(1.f), L::add(L::set(1.f), e));
    return {s, L::mul(L::mul(L::min(L::set(3e38f), e), s), s)};
  }
};

// Where a row is rounded on its way.
enum class GatedRounding : std::uint8_t { kOnce, kNorm, kNormAndProduct };

// One pass over a row is one function, not inlined: as in rms_norm. Passes that know no activation.
template <class V, class T>
struct GatedNormRow {
  using L = RowLanes<V>;
  using F32 = typename L::F32;
  using W = RowWalk<V>;

  template <GatedRounding kRounding>
  [[gnu::always_inline]] static F32 normed(F32 x, F32 k) {
    const F32 n = L::mul(x, k);
    if constexpr (kRounding == GatedRounding::kOnce) return n;
    return L::template round_as<T>(n);
  }
  template <GatedRounding kRounding>
  [[gnu::always_inline]] static F32 product(F32 n, F32 gain) {
    const F32 m = L::mul(n, gain);
    if constexpr (kRounding == GatedRounding::kNormAndProduct) return L::template round_as<T>(m);
    return m;
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
  template <GatedRounding kRounding>
  [[gnu::noinline]] static void gradient(const T* x, const float* d, const float* slope,
                                         const float* gain, float inverse, float along, T* dx,
                                         T* dz, float* dgain, std::size_t cols) {
    const F32 factor = L::set(inverse), down = L::set(along);
    W::each_alone(
        cols, [&](std::size_t i, std::size_t n) __attribute__((always_inline)) {
          const F32 v = W::load(x + i, n), g = W::load(gain + i, n), up = W::load(d + i, n);
          const F32 norm = normed<kRounding>(v, factor);
          W::store(dz + i, L::mul(product<kRounding>(norm, g), W::load(slope + i, n)), n);
          W::store(dx + i, L::sub(L::mul(L::mul(up, g), factor), L::mul(v, down)), n);
          W::store(dgain + i, L::add(W::load(dgain + i, n), L::mul(up, norm)), n);
        });
  }
};

// Those that do.
template <class V, class T, template <class> class A>
struct GatedNormGate {
  using L = RowLanes<V>;
  using F32 = typename L::F32;
  using W = RowWalk<V>;
  using Row = GatedNormRow<V, T>;

  template <GatedRounding kRounding>
  [[gnu::noinline]] static void scale(const T* x, const T* z, float inverse, const float* gain,
                                      T* y, std::size_t cols) {
    const F32 factor = L::set(inverse);
    W::each_pair(
        cols, [&](auto at) __attribute__((always_inline)) {
          F32 v[at.kCount], a[at.kCount], g[at.kCount];
          at.load(x, v);
          at.load(z, a);
          at.template load_beside<T>(gain, g);
          for (std::size_t k = 0; k < at.kCount; ++k)
            v[k] = L::mul(Row::template product<kRounding>(
                              Row::template normed<kRounding>(v[k], factor), g[k]),
                          A<V>::template value<T>(a[k]));
          at.store(y, v);
        });
  }

  struct Sums {
    float squares, dots;
  };
  // d = dy act(z) goes to `d`, dy act'(z) to `slope`.
  [[gnu::noinline]] static Sums gate(const T* x, const T* z, const T* dy, const float* gain,
                                     float* d, float* slope, std::size_t cols) {
    typename W::Sum squares, dots;
    W::each(
        cols, [&](std::size_t i, std::size_t k, std::size_t n) __attribute__((always_inline)) {
          const F32 v = W::load(x + i, n), up = W::load(dy + i, n);
          const auto act = A<V>::template with_slope<T>(W::load(z + i, n));
          const F32 down = L::mul(up, act.value);
          W::store(d + i, down, n);
          W::store(slope + i, L::mul(up, act.slope), n);
          squares.add(k, L::mul(v, v));
          dots.add(k, L::mul(L::mul(down, W::load(gain + i, n)), v));
        });
    return {squares.total(), dots.total()};
  }
};

// body.template operator()<kRounding>(); fp32 is never rounded on the way.
template <class T, class Body>
[[gnu::always_inline]] inline auto with_rounding(const GatedNormProblem& problem, Body body) {
  if constexpr (sizeof(T) == 2)
    if (problem.rounding == NormRounding::kBeforeGain)
      return problem.round_product ? body.template operator()<GatedRounding::kNormAndProduct>()
                                   : body.template operator()<GatedRounding::kNorm>();
  return body.template operator()<GatedRounding::kOnce>();
}

// 1 / sqrt(mean + eps) from the sum of squares.
[[gnu::always_inline]] inline float gated_inverse_rms(float squares, std::size_t cols, float eps) {
  return 1.f / __builtin_sqrtf(squares / static_cast<float>(cols) + eps);
}

template <class V, class T, template <class> class A>
void rms_norm_gated_rows(const GatedNormForward& job, std::size_t begin, std::size_t end) {
  const GatedNormProblem& p = job.problem;
  const auto scale = with_rounding<T>(
      p, []<GatedRounding k>()
             __attribute__((always_inline)) { return &GatedNormGate<V, T, A>::template scale<k>; });
  for (std::size_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
    const float squares = GatedNormRow<V, T>::squares_of(x, p.cols);
    scale(x, static_cast<const T*>(p.z) + row * p.z_stride,
          gated_inverse_rms(squares, p.cols, p.eps), p.gain, static_cast<T*>(job.y) + row * p.cols,
          p.cols);
  }
}

template <class V, class T, template <class> class A>
void rms_norm_gated_backward_rows(const GatedNormBackward& job, std::size_t begin, std::size_t end,
                                  float* dgain, float* scratch) {
  const GatedNormProblem& p = job.problem;
  const auto gradient = with_rounding<T>(
      p, []<GatedRounding k>()
             __attribute__((always_inline)) { return &GatedNormRow<V, T>::template gradient<k>; });
  float* const d = scratch;
  float* const slope = scratch + p.cols;
  for (std::size_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
    const auto sums = GatedNormGate<V, T, A>::gate(
        x, static_cast<const T*>(p.z) + row * p.z_stride,
        static_cast<const T*>(job.dy) + row * job.dy_stride, p.gain, d, slope, p.cols);
    const float inverse = gated_inverse_rms(sums.squares, p.cols, p.eps);
    // k^3 alone overflows for rows near 0 with a small eps.
    const float along = sums.dots * inverse / static_cast<float>(p.cols) * inverse * inverse;
    gradient(x, d, slope, p.gain, inverse, along, static_cast<T*>(job.dx) + row * p.cols,
             static_cast<T*>(job.dz) + row * p.cols, dgain, p.cols);
  }
}

template <class V, class T, template <class> class A>
inline constexpr GatedNormKernels kGatedNormKernels = {rms_norm_gated_rows<V, T, A>,
                                                       rms_norm_gated_backward_rows<V, T, A>};

template <class V>
const GatedNormKernels* rms_norm_gated_variant(DType dtype, Gate gate) {
  return with_type(
      dtype, [&]<class T>() __attribute__((always_inline))->const GatedNormKernels* {
        if (gate == Gate::kSilu) return &kGatedNormKernels<V, T, Silu>;
        return &kGatedNormKernels<V, T, Sigmoid>;
      });
}

}  // namespace monograph
