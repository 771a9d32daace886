// dx for many rows of the left operand: outer products of kSubRows of its rows and some vectors of
// a row of the weight. A slice of the decoded panel, a part of a chunk of these, stays in the
// first-level cache while the rows of a block pass. The order of summation is that of generic.h.
#pragma once

#include <algorithm>
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
  static constexpr std::size_t kWide = ManyBlock<V>::kDxVectors;
  static constexpr std::size_t kSlice = kWide * kLanes;
  static constexpr std::size_t kChunk = VectorSizes<V>::kDxChunk;  // words
  static constexpr std::size_t kTerms = Order::kTerms;
  static constexpr std::size_t kDepth = ManyBlock<V>::kDxDepth;
  static constexpr std::size_t kChain = VectorSizes<V>::kDxChain;
  static_assert(kRows % kSubRows == 0 && kPanel % kSlice == 0);
  static_assert(kChunk % kDepth == 0 && kDepth % kChain == 0);

  // [kSubRows rows together][reduction][row], filled up with zeros.
  template <class T>
  static void pack(const PackJob& job) {
    float* out = reinterpret_cast<float*>(job.out);
    for (std::size_t first = 0; first < job.rows; first += kSubRows, out += job.count * kSubRows)
      pack_transposed<Order, T>(job, first, kSubRows, out);
  }

  [[gnu::always_inline]] static float* place(float* panel, std::size_t row, std::size_t vector) {
    return panel + (vector / kWide * kChunk + row) * kSlice + vector % kWide * kLanes;
  }

  // [slice][row of the weight][kSlice], each vector in places.
  template <class F>
  [[gnu::noinline]] static void decode_whole(const DecodeJob& job, DType dtype) {
    constexpr std::size_t kAhead = 8;  // rows
    const PackedView& packed = job.weight->packed;
    float* const out = reinterpret_cast<float*>(job.out);
    FewNumbers<F> numbers[kPanel / kFewUnit<F> + kLanes];
    for (std::size_t i = 0; i < job.count; ++i) {
      const std::size_t row = job.begin + i;
      const std::uint8_t* next =
          packed.values + few_bytes<F>(packed.element(row + kAhead, job.first));
      prefetch_scales<F>(packed, row + kAhead, job.first);
      for (std::size_t line = 0; line < few_bytes<F>(kPanel); line += 64) V::prefetch(next + line);
      V::prefetch(next + few_bytes<F>(kPanel) - 1);
      decode_units<F, Order>(
          packed, row, job.first, job.width, dtype,
          numbers, [&](std::size_t v, F32 w) __attribute__((always_inline)) {
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
    PlacedRowsFn* const place_rows = placed_rows<RowsOf<F>, Order, T>(*job.weight);
    constexpr std::size_t kTogether = 8;
    alignas(64) float rows[kTogether][kPanel] = {};
    for (std::size_t i = 0; i < job.count; i += kTogether) {
      const std::size_t some = job.count - i < kTogether ? job.count - i : kTogether;
      place_rows(*job.weight, dtype_of<T>, job.begin + i, some, job.first, job.width, rows[0],
                 kPanel);
      for (std::size_t r = 0; r < some; ++r)
        for (std::size_t v = 0; v < kPanel / kLanes; ++v)
          L::store(place(out, i + r, v), L::load(rows[r] + v * kLanes));
    }
  }

  // kM rows of kSubRows by a slice; `count` words of rows of the weight, at most kDepth.
  template <std::size_t kM>
  [[gnu::noinline]] static void outer(const float* left, const float* slice, std::size_t count,
                                      float* totals, bool first) {
    constexpr std::size_t kAhead = 16;  // steps
    while (count != 0) {
      const std::size_t chain = count < kChain ? count : kChain;
      count -= chain;
      F32 sums[kM][kWide];
      unrolled<kM * kWide>([&](auto i) __attribute__((always_inline)) {
        sums[i / kWide][i % kWide] = L::set(0.0f);
      });
      for (std::size_t i = 0; i < chain; ++i, left += kSubRows, slice += kSlice) {
        F32 w[kWide];
        unrolled<kWide>([&](auto v)
                            __attribute__((always_inline)) { w[v] = L::load(slice + v * kLanes); });
        V::prefetch(left + kAhead * kSubRows);
        unrolled<kM>([&](auto m) __attribute__((always_inline)) {
          const F32 g = L::set(left[m]);
          unrolled<kWide>([&](auto v) __attribute__((always_inline)) {
            sums[m][v] = Order::add_products(g, w[v], sums[m][v]);
          });
        });
      }
      unrolled<kM * kWide>([&](auto i) __attribute__((always_inline)) {
        float* out = totals + i * kLanes;
        const F32 had = first ? L::set(0.0f) : L::load(out);
        L::store(out, L::add(had, sums[i / kWide][i % kWide]));
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

  // Sums of a block: [slice][row][kSlice], each vector in places.
  [[gnu::always_inline]] static std::size_t sums_of(std::size_t row, std::size_t column) {
    return (column / kSlice * kRows + row) * kSlice;
  }

  // totals[rows][kSlice], to the sums of earlier chunks or in their place.
  [[gnu::always_inline]] static void add_totals(const float* totals, std::size_t rows, float* out,
                                                bool accumulate) {
    for (std::size_t i = 0; i < rows * kSlice; i += kLanes) {
      const F32 total = L::load(totals + i);
      L::store(out + i, accumulate ? L::add(L::load(out + i), total) : total);
    }
  }
  // They come from far away.
  [[gnu::always_inline]] static void prefetch(const float* sums, std::size_t rows) {
    for (std::size_t i = 0; i < rows * kSlice; i += 16) V::prefetch(sums + i);
  }

  template <class T>
  [[gnu::noinline]] static void finish(const FinishJob& job) {
    const T* bias = static_cast<const T*>(job.bias);
    for (std::size_t r = 0; r < job.rows; ++r) {
      T* const out = static_cast<T*>(job.out) + r * job.stride;
      for (std::size_t p = 0; p < job.width; p += kLanes) {
        const float* const sums = job.c + sums_of(r, p) + p % kSlice;
        F32 sum = Order::from_places(L::load(sums));
        const std::size_t count = job.width - p < kLanes ? job.width - p : kLanes;
        if (job.gain != nullptr) sum = L::mul(ManyForward<Order>::some(job.gain + p, count), sum);
        if (bias != nullptr) sum = L::add(sum, ManyForward<Order>::some(bias + p, count));
        sum = Order::one_nan(sum);
        if (count == kLanes) {
          L::store_as(out + p, sum);
        } else {
          alignas(64) T last[kLanes];
          L::store_as(last, sum);
          for (std::size_t i = 0; i < count; ++i) out[p + i] = last[i];
        }
      }
    }
  }

  template <class T>
  static void multiply(const MultiplyJob& job) {
    const float* const left = reinterpret_cast<const float*>(job.left);
    const float* const panel = reinterpret_cast<const float*>(job.panel);
    alignas(64) float totals[kSubs][kSubRows * kSlice];
    const std::size_t words = (job.count + kTerms - 1) / kTerms;
    if (words == 0) std::fill_n(totals[0], kRows * kSlice, 0.0f);
    const std::size_t subs = (job.rows + kSubRows - 1) / kSubRows;
    const std::size_t parts = words == 0 ? 1 : (words + kDepth - 1) / kDepth;
    for (std::size_t p = 0; p < job.width; p += kSlice) {
      const float* const slice = panel + p / kSlice * kChunk * kSlice;
      for (std::size_t h = 0; h < parts; ++h)
        for (std::size_t s = 0; s < subs; ++s) {
          const std::size_t rows = job.rows - s * kSubRows, i = h * kDepth;
          const std::size_t count = words - i < kDepth ? words - i : kDepth;
          float* const sums = job.c + sums_of(s * kSubRows, p);
          if (h == 0 && job.accumulate) prefetch(sums, kSubRows);
          outer_rows(rows, left + (s * words + i) * kSubRows, slice + i * kSlice, count, totals[s],
                     h == 0);
          if (h + 1 == parts)
            add_totals(totals[s], rows < kSubRows ? rows : kSubRows, sums, job.accumulate);
        }
    }
    if (job.finish != nullptr) finish<T>(*job.finish);
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
    .finish = Kernels::template finish<T>,
    .load_chunks = 1,
    .pass_rows = ManyBlock<V>::kPassRows,
    .few_rows = FewBlock<V>::kDxMost,
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
