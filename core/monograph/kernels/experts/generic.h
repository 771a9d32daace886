// Rows and sums, once for every SIMD vocabulary. Elementwise work and the sums of slots and of a
// row have the same bits on every instruction set; a Gram sum is a chain of what `fma` is there.
#pragma once

#include "monograph/base/float_types.h"
#include "monograph/kernels/experts/activation.h"
#include "monograph/kernels/linear/products.h"
#include "monograph/simd/row_walk.h"
#include "monograph/simd/unrolled.h"

namespace monograph {

// `count` gates and ups from entry `at` on, and back.
template <class V, class T, bool kGated, bool kInterleaved>
struct GateAndUp {
  using L = RowLanes<V>;
  using W = RowWalk<V>;
  using F32 = typename L::F32;
  static constexpr std::size_t kLanes = W::kLanes;

  [[gnu::always_inline]] static void load(const ActivationJob& job, std::size_t at,
                                          std::size_t count, F32& gate, F32& up) {
    const T* pre = static_cast<const T*>(job.pre);
    if constexpr (!kGated) {
      gate = W::load(pre + at, count);
      up = L::set(0.f);
    } else if constexpr (!kInterleaved) {
      gate = W::load(pre + at, count);
      up = W::load(pre + job.inner + at, count);
    } else {
      if (L::template kSplits<T> && count == kLanes) return L::load_two(pre + 2 * at, gate, up);
      T g[kLanes] = {}, u[kLanes] = {};
      for (std::size_t i = 0; i < count; ++i) {
        g[i] = pre[2 * (at + i)];
        u[i] = pre[2 * (at + i) + 1];
      }
      gate = L::load_as(g);
      up = L::load_as(u);
    }
  }
  [[gnu::always_inline]] static void store(const ActivationJob& job, std::size_t at,
                                           std::size_t count, F32 gate, F32 up) {
    T* dpre = static_cast<T*>(job.dpre);
    if constexpr (!kGated) {
      W::store(dpre + at, gate, count);
    } else if constexpr (!kInterleaved) {
      W::store(dpre + at, gate, count);
      W::store(dpre + job.inner + at, up, count);
    } else {
      if (L::template kSplits<T> && count == kLanes) return L::store_two(dpre + 2 * at, gate, up);
      T g[kLanes], u[kLanes];
      L::store_as(g, gate);
      L::store_as(u, up);
      for (std::size_t i = 0; i < count; ++i) {
        dpre[2 * (at + i)] = g[i];
        dpre[2 * (at + i) + 1] = u[i];
      }
    }
  }
};

template <class V, class T, class A, bool kInterleaved>
void activate_row(const ActivationJob& job) {
  using Both = GateAndUp<V, T, A::kGated, kInterleaved>;
  RowWalk<V>::each_alone(
      job.inner, [&](std::size_t at, std::size_t count) __attribute__((always_inline)) {
        typename RowLanes<V>::F32 gate, up;
        Both::load(job, at, count, gate, up);
        RowWalk<V>::store(static_cast<T*>(job.h) + at, A::value(job, gate, up), count);
      });
}

template <class V, class T, class A, bool kInterleaved>
float activate_row_back(const ActivationJob& job) {
  using L = RowLanes<V>;
  using W = RowWalk<V>;
  using Both = GateAndUp<V, T, A::kGated, kInterleaved>;
  typename W::Sum sum;
  W::each_alone(
      job.inner, [&](std::size_t at, std::size_t count) __attribute__((always_inline)) {
        typename L::F32 gate, up;
        Both::load(job, at, count, gate, up);
        const typename L::F32 dh = W::load(static_cast<const T*>(job.dh) + at, count);
        const auto change = A::slopes(job, gate, up, L::mul(L::set(job.weight), dh));
        // Beyond `count` dh is 0.
        sum.add(at / W::kLanes % W::kVectors, L::mul(L::template round_as<T>(change.h), dh));
        if (job.h != nullptr) W::store(static_cast<T*>(job.h) + at, change.h, count);
        if (job.dpre != nullptr) Both::store(job, at, count, change.gate, change.up);
      });
  return sum.total();
}

// run.template operator()<A, kInterleaved>() for the activation of the job.
template <class V, class T, class Run>
[[gnu::always_inline]] inline auto with_activation(const ActivationJob& job, Run run) {
  const auto gated = [&]<class A>() __attribute__((always_inline)) {
    return job.interleaved ? run.template operator()<A, true>()
                           : run.template operator()<A, false>();
  };
  switch (job.activation) {
    case ExpertsActivation::kSiluMul:
      return gated.template operator()<PlainGate<V, T, Silu>>();
    case ExpertsActivation::kClampedSiluMul:
      return gated.template operator()<ClampedSiluGate<V, T>>();
    case ExpertsActivation::kClampedGlu:
      return gated.template operator()<ClampedGlu<V, T>>();
    case ExpertsActivation::kGeluTanhMul:
      return gated.template operator()<PlainGate<V, T, GeluTanh>>();
    case ExpertsActivation::kReluSquare:
      return run.template operator()<ReluSquare<V, T>, false>();
    case ExpertsActivation::kSilu:
      break;
  }
  return run.template operator()<SiluAlone<V, T>, false>();
}

template <class V, class T>
void activate(const ActivationJob& job) {
  with_activation<V, T>(
      job, [&]<class A, bool kInterleaved>() { activate_row<V, T, A, kInterleaved>(job); });
}
template <class V, class T>
float activate_back(const ActivationJob& job) {
  return with_activation<V, T>(job, [&]<class A, bool kInterleaved>() {
    return activate_row_back<V, T, A, kInterleaved>(job);
  });
}

template <class V, class T>
void sum_slots(const SlotSumJob& job) {
  using L = RowLanes<V>;
  RowWalk<V>::each_pair(
      job.cols, [&](auto at) __attribute__((always_inline)) {
        typename L::F32 sum[at.kCount], row[at.kCount];
        for (std::size_t i = 0; i < at.kCount; ++i) sum[i] = L::set(0.f);
        for (std::size_t s = 0; s < job.slots; ++s) {
          if (job.places[s] == kSkippedRow) continue;
          at.load(static_cast<const T*>(job.rows) + job.places[s] * job.stride, row);
          const typename L::F32 factor = L::set(job.factors == nullptr ? 1.f : job.factors[s]);
          for (std::size_t i = 0; i < at.kCount; ++i)
            sum[i] = L::add(sum[i], L::mul(factor, row[i]));
        }
        at.store(static_cast<T*>(job.out), sum);
      });
}

template <class V, class T>
float dot_rows(const void* a, const void* b, std::size_t size) {
  using L = RowLanes<V>;
  using W = RowWalk<V>;
  typename W::Sum sum;
  W::each_alone(
      size, [&](std::size_t at, std::size_t count) __attribute__((always_inline)) {
        sum.add(at / W::kLanes % W::kVectors,
                L::mul(W::load(static_cast<const T*>(a) + at, count),
                       W::load(static_cast<const T*>(b) + at, count)));
      });
  return sum.total();
}

// kRanks x kVectors accumulators, the vectors in the order of load_as.
template <class V, class T, std::size_t kRanks, std::size_t kVectors>
[[gnu::always_inline]] inline void gram_block(const GramJob& job, const float* first,
                                              std::size_t rank, std::size_t col,
                                              std::size_t count) {
  using L = RowLanes<V>;
  using F32 = typename L::F32;
  constexpr std::size_t kAhead = 12;
  F32 sum[kRanks][kVectors];
  unrolled<kRanks * kVectors>([&](auto i) __attribute__((always_inline)) {
    sum[i / kVectors][i % kVectors] = L::set(0.f);
  });
  const float* small = first + rank;
  for (std::size_t t = 0; t < job.count; ++t, small += job.rank) {
    const std::size_t row = job.rows == nullptr ? t : job.rows[t];
    const T* large = static_cast<const T*>(job.large) + row * job.stride + col;
    // Rows lie apart, and no prefetcher knows where the next one is.
    const std::size_t ahead = t + kAhead < job.count ? t + kAhead : t;
    __builtin_prefetch(static_cast<const T*>(job.large) +
                       (job.rows == nullptr ? ahead : job.rows[ahead]) * job.stride + col);
    F32 x[kVectors];
    unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
      x[v] = kVectors == 1 ? RowWalk<V>::load(large, count) : L::load_as(large + v * L::kLanes);
    });
    unrolled<kRanks>([&](auto r) __attribute__((always_inline)) {
      const F32 factor = L::set(small[r]);
      unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
        sum[r][v] = L::fma(factor, x[v], sum[r][v]);
      });
    });
  }
  unrolled<kRanks>([&](auto r) __attribute__((always_inline)) {
    float* out = job.out + (rank + r) * job.out_stride + col;
    unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
      if (kVectors == 1)
        RowWalk<V>::store(out, sum[r][v], count);
      else
        L::store(out + v * L::kLanes, sum[r][v]);
    });
  });
}

template <class V, class T, std::size_t kRanks>
[[gnu::noinline]] void gram_ranks(const GramJob& job, const float* small, std::size_t rank) {
  constexpr std::size_t kLanes = RowLanes<V>::kLanes, kVectors = kRanks == 1 ? 4 : 2;
  std::size_t col = 0;
  for (; col + kVectors * kLanes <= job.cols; col += kVectors * kLanes)
    gram_block<V, T, kRanks, kVectors>(job, small, rank, col, kLanes);
  for (; col < job.cols; col += kLanes)
    gram_block<V, T, kRanks, 1>(job, small, rank, col,
                                job.cols - col < kLanes ? job.cols - col : kLanes);
}

template <class V, class T>
void gram(const GramJob& job, const float* small) {
  constexpr std::size_t kRanks = RowLanes<V>::kLanes == 16 ? 8 : 4;
  std::size_t rank = 0;
  for (; rank + kRanks <= job.rank; rank += kRanks) gram_ranks<V, T, kRanks>(job, small, rank);
  for (; rank < job.rank; ++rank) gram_ranks<V, T, 1>(job, small, rank);
}

// kTileSide vectors of kTileSide lanes; specialised where a set has shuffles for it.
template <class V>
struct TransposeTile {
  template <class From, class To>
  static void run(const From* in, const TransposeJob& job, To* out) {
    for (std::size_t k = 0; k < job.cols; ++k) {
      if (job.index[k] == kSkippedRow) continue;
      To* const to = out + job.index[k] * job.out_stride;
      for (std::size_t i = 0; i < job.rows; ++i)
        to[i] = from_float<To>(to_float(in[i * job.in_stride + k]));
    }
  }
};

template <class V, class From, class To>
void transpose_tile(const TransposeJob& job) {
  TransposeTile<V>::run(static_cast<const From*>(job.in), job, static_cast<To*>(job.out));
}

template <class V, class T>
void round_elements(const float* in, std::size_t size, void* out) {
  RowWalk<V>::each_alone(
      size, [&](std::size_t at, std::size_t count) __attribute__((always_inline)) {
        RowWalk<V>::store(static_cast<T*>(out) + at, RowWalk<V>::load(in + at, count), count);
      });
}
template <class V, class T>
void widen_elements(const void* in, std::size_t size, float* out) {
  RowWalk<V>::each_alone(
      size, [&](std::size_t at, std::size_t count) __attribute__((always_inline)) {
        RowWalk<V>::store(out + at, RowWalk<V>::load(static_cast<const T*>(in) + at, count), count);
      });
}

template <class V, class T>
inline constexpr ExpertsKernels kExpertsKernels = {activate<V, T>,
                                                   activate_back<V, T>,
                                                   sum_slots<V, T>,
                                                   dot_rows<V, T>,
                                                   gram<V, T>,
                                                   transpose_tile<V, T, T>,
                                                   transpose_tile<V, float, T>,
                                                   round_elements<V, T>,
                                                   widen_elements<V, T>};

template <class V>
const ExpertsKernels* experts_variant(DType dtype) {
  return with_type(
      dtype, []<class T>() __attribute__((always_inline)) { return &kExpertsKernels<V, T>; });
}

}  // namespace monograph
