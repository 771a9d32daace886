// The elements, once for every SIMD vocabulary.
#pragma once

#include "monograph/base/float_types.h"
#include "monograph/kernels/adamw/adamw.h"
#include "monograph/simd/row_walk.h"

namespace monograph {

template <class V, class T>
struct AdamwElements {
  using L = RowLanes<V>;
  using F32 = typename L::F32;
  using W = RowWalk<V>;

  static constexpr std::size_t kSumLanes = 16, kVectors = kSumLanes / W::kLanes;

  static double squares(const void* gradient, std::size_t size) {
    const T* const g = static_cast<const T*>(gradient);
    typename L::Doubles sums[kVectors] = {};
    std::size_t i = 0;
    for (; i + kSumLanes <= size; i += kSumLanes)
      for (std::size_t k = 0; k < kVectors; ++k)
        L::add_squares(sums[k], L::load_as(g + i + k * W::kLanes));
    for (std::size_t k = 0; i < size; ++k, i += W::kLanes)
      L::add_squares(sums[k], W::load(g + i, W::lanes_left(size - i)));
    double lanes[kSumLanes];
    for (std::size_t k = 0; k < kVectors; ++k) L::store_doubles(lanes + k * W::kLanes, sums[k]);
    for (std::size_t half = kSumLanes / 2; half > 0; half /= 2)
      for (std::size_t k = 0; k < half; ++k) lanes[k] += lanes[k + half];
    return lanes[0];
  }

  template <bool kDecays>
  static void update_elements(const AdamwTensor& t, const AdamwNumbers& n, std::size_t begin,
                              std::size_t end) {
    const T* const gradient = static_cast<const T*>(t.gradient) + begin;
    float* const parameter = t.parameter + begin;
    float* const exp_avg = t.exp_avg + begin;
    float* const exp_avg_sq = t.exp_avg_sq + begin;
    const F32 clip = L::set(n.clip), beta2 = L::set(n.beta2), rest1 = L::set(n.rest1);
    const F32 rest2 = L::set(n.rest2), decay = L::set(n.decay), eps = L::set(n.eps);
    const F32 step_size = L::set(n.step_size), inverse_root = L::set(n.inverse_root);
    W::each_alone(
        end - begin, [&](std::size_t i, std::size_t count) __attribute__((always_inline)) {
          const F32 g = L::mul(W::load(gradient + i, count), clip);
          F32 m = W::load(exp_avg + i, count), v = W::load(exp_avg_sq + i, count);
          F32 p = W::load(parameter + i, count);
          m = L::add(m, L::mul(L::sub(g, m), rest1));
          v = L::add(L::mul(v, beta2), L::mul(L::mul(g, rest2), g));
          if constexpr (kDecays) p = L::sub(p, L::mul(p, decay));
          const F32 root = L::add(L::mul(L::sqrt(v), inverse_root), eps);
          p = L::sub(p, L::div(L::mul(m, step_size), root));
          W::store(exp_avg + i, m, count);
          W::store(exp_avg_sq + i, v, count);
          W::store(parameter + i, p, count);
        });
  }

  static void update(const AdamwTensor& t, const AdamwNumbers& n, std::size_t begin,
                     std::size_t end) {
    n.decay != 0 ? update_elements<true>(t, n, begin, end)
                 : update_elements<false>(t, n, begin, end);
  }
};

template <class V, class T>
inline constexpr AdamwKernels kAdamwKernels = {AdamwElements<V, T>::squares,
                                               AdamwElements<V, T>::update};

template <class V>
const AdamwKernels* adamw_variant(DType dtype) {
  return with_type(
      dtype, []<class T>() __attribute__((always_inline)) { return &kAdamwKernels<V, T>; });
}

}  // namespace monograph
