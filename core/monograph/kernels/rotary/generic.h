// The heads, once for every SIMD vocabulary.
#pragma once

#include "monograph/base/float_types.h"
#include "monograph/kernels/rms_norm/generic.h"
#include "monograph/kernels/rotary/rotary.h"
#include "monograph/simd/row_walk.h"

namespace monograph {

template <class V, class T>
struct RotaryHead {
  using L = RowLanes<V>;
  using F32 = typename L::F32;
  using W = RowWalk<V>;

  // out = r(v): pairs (a, b) into (-b, a).
  [[gnu::always_inline]] static void turn(const RotaryProblem& p, const float* v, float* out) {
    const std::size_t half = p.rotated / 2;
    if (p.interleaved) {
      for (std::size_t i = 0; i < half; ++i) {
        out[2 * i] = -v[2 * i + 1];
        out[2 * i + 1] = v[2 * i];
      }
      return;
    }
    W::each_alone(
        half, [&](std::size_t i, std::size_t n) __attribute__((always_inline)) {
          W::store(out + i, L::sub(L::set(-0.f), W::load(v + half + i, n)), n);
          W::store(out + half + i, W::load(v + i, n), n);
        });
  }

  // What is left of the norm of a row: 1 / rms, after its values are in v.
  [[gnu::always_inline]] static F32 normed(const RotaryProblem& p, F32 x, F32 factor) {
    const F32 n = L::mul(x, factor);
    return p.rounding == NormRounding::kBeforeGain ? L::template round_as<T>(n) : n;
  }
  [[gnu::always_inline]] static void values(const RotaryProblem& p, const T* x, float* v) {
    if (p.gain == nullptr) {
      W::each_alone(
          p.size, [&](std::size_t i, std::size_t n)
                      __attribute__((always_inline)) { W::store(v + i, W::load(x + i, n), n); });
      return;
    }
    typename W::Sum squares;
    W::each(
        p.size, [&](std::size_t i, std::size_t k, std::size_t n) __attribute__((always_inline)) {
          const F32 e = W::load(x + i, n);
          squares.add(k, L::mul(e, e));
        });
    const F32 factor = L::set(inverse_rms(squares.total(), p.size, p.eps));
    W::each_alone(
        p.size, [&](std::size_t i, std::size_t n) __attribute__((always_inline)) {
          const F32 e = L::mul(normed(p, W::load(x + i, n), factor), W::load(p.gain + i, n));
          W::store(v + i, L::template round_as<T>(e), n);
        });
  }

  [[gnu::always_inline]] static void forward(const RotaryProblem& p, const T* x, const T* cos,
                                             const T* sin, T* y) {
    alignas(64) float v[kLargestHead], turned[kLargestHead];
    values(p, x, v);
    turn(p, v, turned);
    W::each_alone(
        p.rotated, [&](std::size_t i, std::size_t n) __attribute__((always_inline)) {
          const F32 a = L::mul(W::load(v + i, n), W::load(cos + i, n));
          const F32 b = L::mul(W::load(turned + i, n), W::load(sin + i, n));
          W::store(y + i, L::add(L::template round_as<T>(a), L::template round_as<T>(b)), n);
        });
    const float* rest = v + p.rotated;
    W::each_alone(
        p.size - p.rotated, [&](std::size_t i, std::size_t n) __attribute__((always_inline)) {
          W::store(y + p.rotated + i, W::load(rest + i, n), n);
        });
  }

  // g = dy cos - r(dy sin): r transposed is -r.
  [[gnu::always_inline]] static void turn_back(const RotaryProblem& p, const T* dy, const T* cos,
                                               const T* sin, float* g) {
    alignas(64) float scaled[kLargestHead], turned[kLargestHead];
    W::each_alone(
        p.rotated, [&](std::size_t i, std::size_t n) __attribute__((always_inline)) {
          W::store(scaled + i, L::mul(W::load(dy + i, n), W::load(sin + i, n)), n);
        });
    turn(p, scaled, turned);
    W::each_alone(
        p.rotated, [&](std::size_t i, std::size_t n) __attribute__((always_inline)) {
          const F32 along = L::mul(W::load(dy + i, n), W::load(cos + i, n));
          W::store(g + i, L::sub(along, W::load(turned + i, n)), n);
        });
    W::each_alone(
        p.size - p.rotated, [&](std::size_t i, std::size_t n) __attribute__((always_inline)) {
          W::store(g + p.rotated + i, W::load(dy + p.rotated + i, n), n);
        });
  }

  [[gnu::always_inline]] static void backward(const RotaryProblem& p, const T* dy, const T* x,
                                              const T* cos, const T* sin, T* dx, float* dgain) {
    alignas(64) float g[kLargestHead];
    turn_back(p, dy, cos, sin, g);
    if (p.gain == nullptr) {
      W::each_alone(
          p.size, [&](std::size_t i, std::size_t n)
                      __attribute__((always_inline)) { W::store(dx + i, W::load(g + i, n), n); });
      return;
    }
    typename W::Sum squares, dots;
    W::each(
        p.size, [&](std::size_t i, std::size_t k, std::size_t n) __attribute__((always_inline)) {
          const F32 e = W::load(x + i, n);
          const F32 scaled = L::mul(W::load(g + i, n), W::load(p.gain + i, n));
          squares.add(k, L::mul(e, e));
          dots.add(k, L::mul(scaled, e));
        });
    const float inverse = inverse_rms(squares.total(), p.size, p.eps);
    const float along = dots.total() * inverse / static_cast<float>(p.size) * inverse * inverse;
    const F32 factor = L::set(inverse), slope = L::set(along);
    W::each_alone(
        p.size, [&](std::size_t i, std::size_t n) __attribute__((always_inline)) {
          const F32 e = W::load(x + i, n), d = W::load(g + i, n);
          const F32 scaled = L::mul(d, W::load(p.gain + i, n));
          W::store(dx + i, L::sub(L::mul(scaled, factor), L::mul(e, slope)), n);
          if (dgain != nullptr)
            W::store(dgain + i, L::add(W::load(dgain + i, n), L::mul(d, normed(p, e, factor))), n);
        });
  }
};

template <class T>
[[gnu::always_inline]] inline const T* head_of(const HeadRows& rows, std::size_t token,
                                               std::size_t head) {
  return static_cast<const T*>(rows.data) + token * rows.token_stride + head * rows.head_stride;
}

template <class V, class T>
void rotary_tokens(const RotaryForward& job, std::size_t begin, std::size_t end) {
  const RotaryProblem& p = job.problem;
  for (std::size_t t = begin; t < end; ++t) {
    const std::size_t angle = t % p.angles * p.rotated;
    const T *cos = static_cast<const T*>(p.cos) + angle,
            *sin = static_cast<const T*>(p.sin) + angle;
    for (std::size_t h = 0; h < p.heads; ++h)
      RotaryHead<V, T>::forward(p, head_of<T>(job.x, t, h), cos, sin,
                                static_cast<T*>(job.y) + (t * p.heads + h) * p.size);
  }
}

template <class V, class T>
void rotary_backward_tokens(const RotaryBackward& job, std::size_t begin, std::size_t end,
                            float* dgain) {
  const RotaryProblem& p = job.problem;
  for (std::size_t t = begin; t < end; ++t) {
    const std::size_t angle = t % p.angles * p.rotated;
    const T *cos = static_cast<const T*>(p.cos) + angle,
            *sin = static_cast<const T*>(p.sin) + angle;
    for (std::size_t h = 0; h < p.heads; ++h)
      RotaryHead<V, T>::backward(p, head_of<T>(job.dy, t, h), head_of<T>(job.x, t, h), cos, sin,
                                 static_cast<T*>(job.dx) + (t * p.heads + h) * p.size, dgain);
  }
}

template <class V, class T>
inline constexpr RotaryKernels kRotaryKernels = {rotary_tokens<V, T>, rotary_backward_tokens<V, T>};

template <class V>
const RotaryKernels* rotary_variant(DType dtype) {
  return with_type(
      dtype, []<class T>() __attribute__((always_inline)) { return &kRotaryKernels<V, T>; });
}

}  // namespace monograph
