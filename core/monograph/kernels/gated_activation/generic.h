// The elements of a row, once for every SIMD vocabulary.
#pragma once

#include "monograph/base/float_types.h"
#include "monograph/kernels/gated_activation/activations.h"
#include "monograph/kernels/gated_activation/gated_activation.h"
#include "monograph/simd/row_walk.h"

namespace monograph {

template <class V, class T, template <class> class F>
void gated_row(const GatedForward& job, std::size_t row, std::size_t begin, std::size_t end) {
  using L = RowLanes<V>;
  using W = RowWalk<V>;
  const T* gate = static_cast<const T*>(job.gate) + row * job.gate_stride + begin;
  const T* up = static_cast<const T*>(job.up) + row * job.up_stride + begin;
  T* y = static_cast<T*>(job.y) + row * job.cols + begin;
  W::each_pair(
      end - begin, [&](auto at) __attribute__((always_inline)) {
        typename L::F32 g[at.kCount], u[at.kCount];
        at.load(gate, g);
        at.load(up, u);
        for (std::size_t k = 0; k < at.kCount; ++k)
          u[k] = L::mul(L::template round_as<T>(F<V>::template value<T>(g[k])), u[k]);
        at.store(y, u);
      });
}

template <class V, class T, template <class> class F>
void gated_backward_row(const GatedBackward& job, std::size_t row, std::size_t begin,
                        std::size_t end) {
  using L = RowLanes<V>;
  using W = RowWalk<V>;
  const T* dy = static_cast<const T*>(job.dy) + row * job.dy_stride + begin;
  const T* gate = static_cast<const T*>(job.gate) + row * job.gate_stride + begin;
  const T* up = static_cast<const T*>(job.up) + row * job.up_stride + begin;
  T* dgate = static_cast<T*>(job.dgate) + row * job.cols + begin;
  T* dup = static_cast<T*>(job.dup) + row * job.cols + begin;
  W::each_pair(
      end - begin, [&](auto at) __attribute__((always_inline)) {
        typename L::F32 g[at.kCount], u[at.kCount], d[at.kCount];
        at.load(gate, g);
        at.load(up, u);
        at.load(dy, d);
        for (std::size_t k = 0; k < at.kCount; ++k) {
          const auto f = F<V>::template with_slope<T>(g[k]);
          g[k] = L::mul(L::mul(d[k], u[k]), f.slope);
          u[k] = L::mul(d[k], L::template round_as<T>(f.value));
        }
        at.store(dgate, g);
        at.store(dup, u);
      });
}

template <class V, class T, template <class> class F>
inline constexpr GatedKernels kGatedKernels = {gated_row<V, T, F>, gated_backward_row<V, T, F>};

template <class V>
const GatedKernels* gated_activation_variant(DType dtype, Activation activation) {
  return with_type(
      dtype, [&]<class T>() __attribute__((always_inline))->const GatedKernels* {
        switch (activation) {
          case Activation::kSilu:
            return &kGatedKernels<V, T, Silu>;
          case Activation::kGeluTanh:
            return &kGatedKernels<V, T, GeluTanh>;
          case Activation::kGelu:
            break;
        }
        return &kGatedKernels<V, T, Gelu>;
      });
}

}  // namespace monograph
