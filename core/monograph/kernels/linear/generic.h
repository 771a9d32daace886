// The product in fp32 vectors, once for every SIMD vocabulary V and activation type T. Forward
// takes dot products along the reduction, dx outer products across it: both read the weight in the
// order in which it is stored, and no transpose is needed.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "monograph/base/float_types.h"
#include "monograph/kernels/linear/elements.h"
#include "monograph/kernels/linear/kernels.h"
#include "monograph/simd/lanes.h"
#include "monograph/simd/unrolled.h"

namespace monograph {

// What V keeps in registers, specialised beside each instantiation: L, the lanes it computes with;
// for the kernels of this file kRows x 4 accumulators forward, kDxRows x kDxVectors for dx.
template <class V>
struct RegisterBlock;

template <class V>
struct VectorSizes {
  using L = typename RegisterBlock<V>::L;
  static constexpr std::size_t kColumns = 4;        // of W^T, in registers together
  static constexpr std::size_t kForwardPanel = 16;  // at most 32 KiB of decoded weight
  static constexpr std::size_t kForwardChunk = 32 * L::kLanes;
  static constexpr std::size_t kDxPanel = 128;
  static constexpr std::size_t kDxChunk = 256, kDxChain = 16;
  static_assert(kForwardPanel % kColumns == 0);
};

template <class L>
[[gnu::always_inline]] inline std::size_t padded_lanes(std::size_t count) {
  return (count + L::kLanes - 1) / L::kLanes * L::kLanes;
}

// `count` elements as floats, filled up with zeros to whole vectors.
template <class L, class T>
[[gnu::always_inline]] inline void widen(const T* in, std::size_t count, float* out) {
  std::size_t i = 0;
  for (; i + L::kLanes <= count; i += L::kLanes) L::store(out + i, L::template load_as<T>(in + i));
  for (; i < count; ++i) out[i] = to_float(in[i]);
  for (; i % L::kLanes != 0; ++i) out[i] = 0.0f;
}

// A piece of a row of the weight, rounded to T, as floats.
template <class F, class V, class T>
[[gnu::always_inline]] inline void decode_widened(const LinearWeight& weight, std::size_t row,
                                                  std::size_t begin, std::size_t count,
                                                  float* out) {
  constexpr std::size_t kBuffer = 512;
  T elements[kBuffer];
  for (std::size_t c = 0; c < count; c += kBuffer) {
    const std::size_t n = count - c < kBuffer ? count - c : kBuffer;
    decode_elements<F, V>(weight, row, begin + c, begin + c + n, elements);
    widen<typename RegisterBlock<V>::L>(elements, n, out + c);
  }
}

// `count` elements from `begin` on of `rows` rows, `stride` apart. Not inlined: both passes decode,
// and decoders of all formats are most of what a unit compiles.
template <class F, class V, class T>
[[gnu::noinline]] void decode_rows(const LinearWeight& weight, std::size_t first, std::size_t rows,
                                   std::size_t begin, std::size_t count, float* out,
                                   std::size_t stride) {
  for (std::size_t r = 0; r < rows; ++r)
    decode_widened<F, V, T>(weight, first + r, begin, count, out + r * stride);
}

// [row][count], rows padded to whole vectors.
template <class V, class T>
void pack_forward_rows(const PackJob& job) {
  using L = typename RegisterBlock<V>::L;
  float* out = reinterpret_cast<float*>(job.out);
  for (std::size_t r = 0; r < job.rows; ++r)
    widen<L>(static_cast<const T*>(job.data) + r * job.stride + job.begin, job.count,
             out + r * padded_lanes<L>(job.count));
}

template <class F, class V, class T>
void decode_forward_rows(const DecodeJob& job) {
  decode_rows<F, V, T>(*job.weight, job.first, job.width, job.begin, job.count,
                       reinterpret_cast<float*>(job.out),
                       padded_lanes<typename RegisterBlock<V>::L>(job.count));
}

// kRows rows of the left operand by four of the weight.
template <class V, std::size_t kRows>
[[gnu::always_inline]] inline void dot_block(const float* left, const float* panel,
                                             std::size_t stride, float* c, bool accumulate) {
  using L = typename RegisterBlock<V>::L;
  constexpr std::size_t kColumns = VectorSizes<V>::kColumns;
  using F32 = typename L::F32;
  F32 sum[kRows][kColumns];
  unrolled<kRows * kColumns>([&](auto i) __attribute__((always_inline)) {
    sum[i / kColumns][i % kColumns] = L::set(0.0f);
  });
  for (std::size_t k = 0; k < stride; k += L::kLanes) {
    F32 x[kRows];
    unrolled<kRows>([&](auto r)
                        __attribute__((always_inline)) { x[r] = L::load(left + r * stride + k); });
    unrolled<kColumns>([&](auto n) __attribute__((always_inline)) {
      const F32 w = L::load(panel + n * stride + k);
      unrolled<kRows>([&](auto r) __attribute__((always_inline)) {
        sum[r][n] = L::fma(x[r], w, sum[r][n]);
      });
    });
  }
  unrolled<kRows>([&](auto r) __attribute__((always_inline)) {
    float total[kColumns];
    L::sum4(sum[r], total);
    float* out = c + r * VectorSizes<V>::kForwardPanel;
    for (std::size_t n = 0; n < kColumns; ++n) out[n] = accumulate ? out[n] + total[n] : total[n];
  });
}

template <class V, std::size_t kRows>
[[gnu::noinline]] void dot_panel(const MultiplyJob& job) {
  const std::size_t stride = padded_lanes<typename RegisterBlock<V>::L>(job.count);
  const float* left = reinterpret_cast<const float*>(job.left);
  const float* panel = reinterpret_cast<const float*>(job.panel);
  for (std::size_t n = 0; n < job.width; n += VectorSizes<V>::kColumns)
    dot_block<V, kRows>(left, panel + n * stride, stride, job.c + n, job.accumulate);
}

// [reduction][row], kDxRows apart whatever the number of rows.
template <class V, class T>
void pack_dx_rows(const PackJob& job) {
  float* out = reinterpret_cast<float*>(job.out);
  for (std::size_t r = 0; r < job.rows; ++r) {
    const T* in = static_cast<const T*>(job.data) + r * job.stride + job.begin;
    for (std::size_t i = 0; i < job.count; ++i)
      out[i * RegisterBlock<V>::kDxRows + r] = to_float(in[i]);
  }
}

// [reduction][kDxPanel].
template <class F, class V, class T>
void decode_dx_rows(const DecodeJob& job) {
  decode_rows<F, V, T>(*job.weight, job.begin, job.count, job.first, job.width,
                       reinterpret_cast<float*>(job.out), VectorSizes<V>::kDxPanel);
}

// Chains of kDxChain in one set of accumulators, their sums in another: one chain of 256 has twice
// the error of F.linear for a single row of fp32.
template <class V, std::size_t kRows>
[[gnu::always_inline]] inline void outer_block(const float* left, const float* panel,
                                               std::size_t count, float* c, bool accumulate) {
  using L = typename RegisterBlock<V>::L;
  using F32 = typename L::F32;
  constexpr std::size_t kPanel = VectorSizes<V>::kDxPanel, kChain = VectorSizes<V>::kDxChain;
  constexpr std::size_t kVectors = RegisterBlock<V>::kDxVectors;
  F32 total[kRows][kVectors], sum[kRows][kVectors];
  unrolled<kRows * kVectors>([&](auto i) __attribute__((always_inline)) {
    total[i / kVectors][i % kVectors] = L::set(0.0f);
  });
  while (count != 0) {
    const std::size_t chain = count < kChain ? count : kChain;
    count -= chain;
    unrolled<kRows * kVectors>([&](auto i) __attribute__((always_inline)) {
      sum[i / kVectors][i % kVectors] = L::set(0.0f);
    });
    for (std::size_t i = 0; i < chain; ++i, left += RegisterBlock<V>::kDxRows, panel += kPanel) {
      F32 w[kVectors];
      unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
        w[v] = L::load(panel + v * L::kLanes);
      });
      unrolled<kRows>([&](auto r) __attribute__((always_inline)) {
        const F32 g = L::set(left[r]);
        unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
          sum[r][v] = L::fma(g, w[v], sum[r][v]);
        });
      });
    }
    unrolled<kRows * kVectors>([&](auto i) __attribute__((always_inline)) {
      constexpr std::size_t r = i / kVectors, v = i % kVectors;
      total[r][v] = L::add(total[r][v], sum[r][v]);
    });
  }
  unrolled<kRows * kVectors>([&](auto i) __attribute__((always_inline)) {
    constexpr std::size_t r = i / kVectors, v = i % kVectors;
    float* out = c + r * kPanel + v * L::kLanes;
    L::store(out, accumulate ? L::add(L::load(out), total[r][v]) : total[r][v]);
  });
}

template <class V, std::size_t kRows>
[[gnu::noinline]] void outer_panel(const MultiplyJob& job) {
  const float* left = reinterpret_cast<const float*>(job.left);
  const float* panel = reinterpret_cast<const float*>(job.panel);
  constexpr std::size_t kGroup = RegisterBlock<V>::kDxVectors * RegisterBlock<V>::L::kLanes;
  static_assert(VectorSizes<V>::kDxPanel % kGroup == 0);
  for (std::size_t p = 0; p < job.width; p += kGroup)
    outer_block<V, kRows>(left, panel + p, job.count, job.c + p, job.accumulate);
}

// A sum rounded to T. Every NaN becomes the same: which of several a sum keeps, and with which
// sign, is the compiler's choice.
template <class T>
[[gnu::always_inline]] inline T finished(float sum) {
  return from_float<T>(sum != sum ? std::bit_cast<float>(0x7fc00000u) : sum);
}

template <class V, class T, std::size_t kPanel>
[[gnu::noinline]] void finish_rows(const FinishJob& job) {
  const T* bias = static_cast<const T*>(job.bias);
  for (std::size_t r = 0; r < job.rows; ++r) {
    const float* c = job.c + r * kPanel;
    T* out = static_cast<T*>(job.out) + r * job.stride;
    if (job.gain != nullptr) {
      for (std::size_t p = 0; p < job.width; ++p) {
        const float product = job.gain[p] * c[p];
        out[p] = finished<T>(bias != nullptr ? product + to_float(bias[p]) : product);
      }
    } else if (bias != nullptr) {
      for (std::size_t p = 0; p < job.width; ++p) out[p] = finished<T>(c[p] + to_float(bias[p]));
    } else {
      for (std::size_t p = 0; p < job.width; ++p) out[p] = finished<T>(c[p]);
    }
  }
}

// Fewer rows than a block have fewer accumulators, not another order.
template <class V, std::size_t kRows = RegisterBlock<V>::kRows>
[[gnu::always_inline]] inline void multiply_dots(const MultiplyJob& job) {
  if (job.rows == kRows) return dot_panel<V, kRows>(job);
  if constexpr (kRows > 1) multiply_dots<V, kRows - 1>(job);
}
template <class V, std::size_t kRows = RegisterBlock<V>::kDxRows>
[[gnu::always_inline]] inline void multiply_outer(const MultiplyJob& job) {
  if (job.rows == kRows) return outer_panel<V, kRows>(job);
  if constexpr (kRows > 1) multiply_outer<V, kRows - 1>(job);
}

template <class V, class T>
void multiply_forward(const MultiplyJob& job) {
  multiply_dots<V>(job);
  if (job.finish != nullptr) finish_rows<V, T, VectorSizes<V>::kForwardPanel>(*job.finish);
}
template <class V, class T>
void multiply_dx(const MultiplyJob& job) {
  multiply_outer<V>(job);
  if (job.finish != nullptr) finish_rows<V, T, VectorSizes<V>::kDxPanel>(*job.finish);
}

template <class V, class T>
DecodeFn* forward_decoder(Format format) {
  return find_decoder(PackedFormats{}, format,
                      []<class F>() -> DecodeFn* { return decode_forward_rows<F, V, T>; });
}
template <class V, class T>
DecodeFn* dx_decoder(Format format) {
  return find_decoder(PackedFormats{}, format,
                      []<class F>() -> DecodeFn* { return decode_dx_rows<F, V, T>; });
}

template <class V, class T>
inline constexpr LinearKernels kForwardKernels = {
    .block = RegisterBlock<V>::kRows,
    .panel = VectorSizes<V>::kForwardPanel,
    .step = RegisterBlock<V>::L::kLanes,
    .chunk = VectorSizes<V>::kForwardChunk,
    .left_bytes = 4,
    .panel_step_bytes = VectorSizes<V>::kForwardPanel* RegisterBlock<V>::L::kLanes * 4,
    .pack = pack_forward_rows<V, T>,
    .multiply = multiply_forward<V, T>,
    .decoder = forward_decoder<V, T>,
    .finish = finish_rows<V, T, VectorSizes<V>::kForwardPanel>};

template <class V, class T>
inline constexpr LinearKernels kDxKernels = {.block = RegisterBlock<V>::kDxRows,
                                             .panel = VectorSizes<V>::kDxPanel,
                                             .step = 1,
                                             .chunk = VectorSizes<V>::kDxChunk,
                                             .left_bytes = 4,
                                             .panel_step_bytes = VectorSizes<V>::kDxPanel * 4,
                                             .pack = pack_dx_rows<V, T>,
                                             .multiply = multiply_dx<V, T>,
                                             .decoder = dx_decoder<V, T>,
                                             .finish = finish_rows<V, T, VectorSizes<V>::kDxPanel>};

template <class V>
const LinearKernels* find_linear(DType dtype, Pass pass) {
  return with_type(
      dtype, [&]<class T>() __attribute__((always_inline)) {
        static_assert(kForwardKernels<V, T>.has_sizes() && kDxKernels<V, T>.has_sizes());
        return pass == Pass::kForward ? &kForwardKernels<V, T> : &kDxKernels<V, T>;
      });
}

}  // namespace monograph
