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
  [[gnu::noinline]] static float inverse_of(const RotaryProblem& p, const T* x) {
    typename W::Sum squares;
    W::each(
        p.size, [&](std::size_t i, std::size_t k, std::size_t n) __attribute__((always_inline)) {
          const F32 e = W::load(x + i, n);
          squares.add(k, L::mul(e, e));
        });
    return inverse_rms(squares.total(), p.size, p.eps);
  }
  [[gnu::always_inline]] static void values(const RotaryProblem& p, const T* x, float inverse,
                                            float* v) {
    if (p.gain == nullptr) {
      W::each_alone(
          p.size, [&](std::size_t i, std::size_t n)
                      __attribute__((always_inline)) { W::store(v + i, W::load(x + i, n), n); });
      return;
    }
    const F32 factor = L::set(inverse);
    W::each_alone(
        p.size, [&](std::size_t i, std::size_t n) __attribute__((always_inline)) {
          const F32 e = L::mul(normed(p, W::load(x + i, n), factor), W::load(p.gain + i, n));
          W::store(v + i, L::template round_as<T>(e), n);
        });
  }

  [[gnu::noinline]] static void forward(const RotaryProblem& p, const T* x, const T* cos,
                                        const T* sin, float inverse, T* y) {
    alignas(64) float v[kLargestRotaryHead], turned[kLargestRotaryHead];
    values(p, x, inverse, v);
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

  // Whether the fast path below fits: pairs in halves, all of them in whole vectors, two at a time.
  static bool in_whole_vectors(const RotaryProblem& p) {
    constexpr std::size_t kTwo = 2 * W::kLanes;
    return !p.interleaved && p.rotated / 2 % kTwo == 0 && p.size % kTwo == 0;
  }

  // The values of a head in the order of load_two.
  [[gnu::always_inline]] static void values_of_pairs(const RotaryProblem& p, const T* x,
                                                     float inverse, float* v) {
    const F32 factor = L::set(inverse);
    for (std::size_t i = 0; i < p.size; i += 2 * W::kLanes) {
      F32 e[2], g[2];
      L::load_two(x + i, e[0], e[1]);
      if (p.gain != nullptr) {
        L::load_two(p.gain + i, g[0], g[1]);
        L::template ordered_as<T>(g[0], g[1]);
        for (int k = 0; k < 2; ++k)
          e[k] = L::template round_as<T>(L::mul(normed(p, e[k], factor), g[k]));
      }
      L::store(v + i, e[0]);
      L::store(v + i + W::kLanes, e[1]);
    }
  }

  // The same bits as `forward`, without a copy that is turned.
  [[gnu::noinline]] static void forward_of_pairs(const RotaryProblem& p, const T* x, const T* cos,
                                                 const T* sin, float inverse, T* y) {
    alignas(64) float v[kLargestRotaryHead];
    values_of_pairs(p, x, inverse, v);
    const std::size_t half = p.rotated / 2;
    for (std::size_t i = 0; i < half; i += 2 * W::kLanes) {
      F32 cos_a[2], sin_a[2], cos_b[2], sin_b[2], of_a[2], of_b[2];
      L::load_two(cos + i, cos_a[0], cos_a[1]);
      L::load_two(sin + i, sin_a[0], sin_a[1]);
      L::load_two(cos + half + i, cos_b[0], cos_b[1]);
      L::load_two(sin + half + i, sin_b[0], sin_b[1]);
      for (int k = 0; k < 2; ++k) {
        const F32 a = L::load(v + i + k * W::kLanes), b = L::load(v + half + i + k * W::kLanes);
        const F32 turned = L::sub(L::set(-0.f), b);
        of_a[k] = L::add(L::template round_as<T>(L::mul(a, cos_a[k])),
                         L::template round_as<T>(L::mul(turned, sin_a[k])));
        of_b[k] = L::add(L::template round_as<T>(L::mul(b, cos_b[k])),
                         L::template round_as<T>(L::mul(a, sin_b[k])));
      }
      L::store_two(y + i, of_a[0], of_a[1]);
      L::store_two(y + half + i, of_b[0], of_b[1]);
    }
    for (std::size_t i = p.rotated; i < p.size; i += 2 * W::kLanes)
      L::store_two(y + i, L::load(v + i), L::load(v + i + W::kLanes));
  }

  // g = dy cos - r(dy sin): r transposed is -r.
  [[gnu::always_inline]] static void turn_back(const RotaryProblem& p, const T* dy, const T* cos,
                                               const T* sin, float* g) {
    const std::size_t half = p.rotated / 2;
    if (in_whole_vectors(p)) {
      for (std::size_t i = 0, j = half; i < half; i += W::kLanes, j += W::kLanes) {
        const F32 a = L::load_as(dy + i), b = L::load_as(dy + j);
        const F32 turned = L::sub(L::set(-0.f), L::mul(b, L::load_as(sin + j)));
        L::store(g + i, L::sub(L::mul(a, L::load_as(cos + i)), turned));
        L::store(g + j, L::sub(L::mul(b, L::load_as(cos + j)), L::mul(a, L::load_as(sin + i))));
      }
      for (std::size_t i = p.rotated; i < p.size; i += W::kLanes)
        L::store(g + i, L::load_as(dy + i));
      return;
    }
    alignas(64) float scaled[kLargestRotaryHead], turned[kLargestRotaryHead];
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
    alignas(64) float g[kLargestRotaryHead];
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

inline constexpr std::size_t kHeadsTogether = 16;

template <class V, class T>
void rotary_tokens(const RotaryForward& job, std::size_t begin, std::size_t end) {
  const RotaryProblem& p = job.problem;
  using Head = RotaryHead<V, T>;
  const auto turn = Head::in_whole_vectors(p) ? Head::forward_of_pairs : Head::forward;
  for (std::size_t t = begin; t < end; ++t) {
    const std::size_t angle = t % p.angles * p.rotated;
    const T *cos = static_cast<const T*>(p.cos) + angle,
            *sin = static_cast<const T*>(p.sin) + angle;
    // The sums of several heads, one after the other: their latencies overlap.
    for (std::size_t first = 0; first < p.heads; first += kHeadsTogether) {
      const std::size_t last = first + kHeadsTogether < p.heads ? first + kHeadsTogether : p.heads;
      float inverses[kHeadsTogether] = {};
      for (std::size_t h = first; h < last && p.gain != nullptr; ++h)
        inverses[h - first] = Head::inverse_of(p, head_of<T>(job.x, t, h));
      for (std::size_t h = first; h < last; ++h)
        turn(p, head_of<T>(job.x, t, h), cos, sin, inverses[h - first],
             static_cast<T*>(job.y) + (t * p.heads + h) * p.size);
    }
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
