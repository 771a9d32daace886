// dx for many rows of the left operand: outer products of kSubRows of its rows and two vectors of a
// row of the weight. A slice of the decoded panel, half a chunk of two vectors, stays in the
// first-level cache while the rows of a block pass. The order of summation is that of generic.h.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "monograph/kernels/linear/few_dx.h"
#include "monograph/kernels/linear/many_forward.h"

namespace monograph {

template <class Order>
struct ManyDx {
  using V = typename Order::V;
  using L = typename Order::L;
  using F32 = typename L::F32;
  static constexpr std::size_t kLanes = L::kLanes;
  static constexpr std::size_t kSubRows = ManyBlock<V>::kDxRows;
  static constexpr std::size_t kRows = 48;
  static constexpr std::size_t kSubs = kRows / kSubRows;
  static constexpr std::size_t kPanel = 128;
  static constexpr std::size_t kSlice = 2 * kLanes, kSlices = kPanel / kSlice;
  static constexpr std::size_t kChunk = VectorSizes<V>::kDxChunk;
  static constexpr std::size_t kHalf = kChunk / 2;
  static constexpr std::size_t kChain = VectorSizes<V>::kDxChain;
  static_assert(kRows % kSubRows == 0 && kHalf % kChain == 0);

  // [kSubRows rows together][reduction][row], filled up with zeros.
  template <class T>
  static void pack(const PackJob& job) {
    float* out = reinterpret_cast<float*>(job.out);
    for (std::size_t first = 0; first < job.rows; first += kSubRows, out += job.count * kSubRows)
      pack_transposed<T>(job, first, kSubRows, out);
  }

  [[gnu::always_inline]] static float* place(float* panel, std::size_t row, std::size_t vector) {
    return panel + (vector / 2 * kChunk + row) * kSlice + vector % 2 * kLanes;
  }

  // [slice][row of the weight][kSlice], each vector in places.
  template <class F>
  [[gnu::noinline]] static void decode_whole(const DecodeJob& job, DType dtype) {
    constexpr std::size_t kAhead = 8;  // rows
    const PackedView& packed = job.weight->packed;
    float* const out = reinterpret_cast<float*>(job.out);
    float scales[kPanel / kFewUnit<F> + kLanes];
    for (std::size_t i = 0; i < job.count; ++i) {
      const std::size_t row = job.begin + i;
      const std::uint8_t* next =
          packed.values + few_bytes<F>(packed.element(row + kAhead, job.first));
      for (std::size_t line = 0; line < few_bytes<F>(kPanel); line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(next + line), _MM_HINT_T0);
      decode_units<F, Order>(
          packed, row, job.first, job.width, dtype,
          scales, [&](std::size_t v, F32 w) __attribute__((always_inline)) {
            L::store(place(out, i, v), w);
          });
    }
  }

  template <class F, class T>
  static void decode(const DecodeJob& job) {
    using Unit = Decoded<F, T>;
    if constexpr (kInRegisters<Unit>)
      if (begins_with_units<Unit>(*job.weight, job.first, dtype_of<T>) &&
          job.width % kFewUnit<Unit> == 0)
        return decode_whole<Unit>(job, dtype_of<T>);
    float* const out = reinterpret_cast<float*>(job.out);
    for (std::size_t i = 0; i < job.count; ++i) {
      alignas(64) float row[kPanel] = {};
      decode_rows<RowsOf<F>, V, T>(*job.weight, job.begin + i, 1, job.first, job.width, row,
                                   kPanel);
      for (std::size_t v = 0; v < kPanel / kLanes; ++v)
        L::store(place(out, i, v), Order::to_places(L::load(row + v * kLanes)));
    }
  }

  // kM rows of kSubRows by a slice; `count` rows of the weight, at most half a chunk.
  template <std::size_t kM>
  [[gnu::noinline]] static void outer(const float* left, const float* slice, std::size_t count,
                                      float* totals, bool first) {
    while (count != 0) {
      const std::size_t chain = count < kChain ? count : kChain;
      count -= chain;
      F32 sums[kM][2];
      unrolled<kM>([&](auto m)
                       __attribute__((always_inline)) { sums[m][0] = sums[m][1] = L::set(0.0f); });
      for (std::size_t i = 0; i < chain; ++i, left += kSubRows, slice += kSlice) {
        const F32 a = L::load(slice), b = L::load(slice + kLanes);
        unrolled<kM>([&](auto m) __attribute__((always_inline)) {
          const F32 g = L::set(left[m]);
          sums[m][0] = L::fma(g, a, sums[m][0]);
          sums[m][1] = L::fma(g, b, sums[m][1]);
        });
      }
      unrolled<2 * kM>([&](auto i) __attribute__((always_inline)) {
        float* out = totals + i * kLanes;
        const F32 had = first ? L::set(0.0f) : L::load(out);
        L::store(out, L::add(had, sums[i / 2][i % 2]));
      });
      first = false;
    }
  }

  [[gnu::always_inline]] static void outer_rows(std::size_t rows, const float* left,
                                                const float* slice, std::size_t count,
                                                float* totals, bool first) {
    constexpr std::size_t kThird = (kSubRows + 2) / 3;
    if (rows <= kThird)
      outer<kThird>(left, slice, count, totals, first);
    else if (rows <= 2 * kThird)
      outer<2 * kThird>(left, slice, count, totals, first);
    else
      outer<kSubRows>(left, slice, count, totals, first);
  }

  template <class T>
  static void multiply(const MultiplyJob& job) {
    const float* const left = reinterpret_cast<const float*>(job.left);
    const float* const panel = reinterpret_cast<const float*>(job.panel);
    alignas(64) float totals[kSubs][kSubRows * kSlice];
    const std::size_t subs = (job.rows + kSubRows - 1) / kSubRows;
    for (std::size_t p = 0; p < job.width; p += kSlice) {
      const float* const slice = panel + p / kSlice * kChunk * kSlice;
      for (std::size_t i = 0; i < job.count; i += kHalf)
        for (std::size_t s = 0; s < subs; ++s)
          outer_rows(job.rows - s * kSubRows, left + (s * job.count + i) * kSubRows,
                     slice + i * kSlice, job.count - i < kHalf ? job.count - i : kHalf, totals[s],
                     i == 0);
      for (std::size_t r = 0; r < job.rows; ++r)
        for (std::size_t v = 0; v < 2; ++v) {
          float* const out = job.c + r * kPanel + p + v * kLanes;
          const float* const from = totals[r / kSubRows] + (r % kSubRows * 2 + v) * kLanes;
          const F32 total = job.count == 0 ? L::set(0.0f) : Order::from_places(L::load(from));
          L::store(out, job.accumulate ? L::add(L::load(out), total) : total);
        }
    }
    if (job.finish != nullptr) finish_rows<V, T, kPanel>(*job.finish);
  }
};

template <class V, class T, class Kernels = ManyDx<typename FewOrderOf<V, T>::Type>>
inline constexpr LinearKernels kManyDxKernels = {
    .block = Kernels::kRows,
    .panel = Kernels::kPanel,
    .step = 1,
    .chunk = Kernels::kChunk,
    .left_bytes = 4,
    .panel_step_bytes = Kernels::kPanel * sizeof(float),
    .pack = Kernels::template pack<T>,
    .multiply = Kernels::template multiply<T>,
    .decoder = many_decoder<Kernels, T>,
    .load_chunks = 1,
    .pass_rows = ManyBlock<V>::kPassRows,
    .few_rows = FewBlock<V>::kMost,
    .few = &kFewDxKernels<V, T>};

// What an instruction set without tiles gives: find_linear().
template <class V>
const LinearKernels* find_by_rows(DType dtype, Pass pass) {
  return with_type(
      dtype, [&]<class T>() __attribute__((always_inline)) {
        static_assert(kManyForwardKernels<V, T>.has_sizes() && kManyDxKernels<V, T>.has_sizes());
        static_assert(kFewForwardKernels<V, T>.has_sizes() && kFewDxKernels<V, T>.has_sizes());
        return pass == Pass::kForward ? &kManyForwardKernels<V, T> : &kManyDxKernels<V, T>;
      });
}

}  // namespace monograph
