// Forward for many rows of the left operand: lanes are its rows, a weight is broadcast. What a dot
// product has in lane l is summed alone, over 32 terms, and the tree over the lanes becomes plain
// additions of whole vectors. The order of summation is that of few_forward.h and generic.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "monograph/kernels/linear/few_forward.h"
#include "monograph/simd/unrolled.h"

namespace monograph {

// Specialised beside each instantiation: kVectors x kColumns accumulators, rows of the left operand
// by rows of the weight; kDxRows x kDxVectors of dx, over kDxDepth rows of the weight; kPassRows,
// rows for which a weight is decoded once.
template <class V>
struct ManyBlock;

// The lanes in the order in which sum4() adds them.
template <std::size_t kLanes>
struct LaneTree;
template <>
struct LaneTree<16> {
  static constexpr std::size_t kOrder[] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};
  static constexpr std::size_t kLevels = 4;
};
template <>
struct LaneTree<8> {
  static constexpr std::size_t kOrder[] = {0, 2, 1, 3, 4, 6, 5, 7};
  static constexpr std::size_t kLevels = 3;
};

template <class Order>
struct ManyForward {
  using V = typename Order::V;
  using L = typename Order::L;
  using F32 = typename L::F32;
  static constexpr std::size_t kLanes = L::kLanes;
  static constexpr std::size_t kVectors = ManyBlock<V>::kVectors;
  static constexpr std::size_t kRows = kVectors * kLanes;
  static constexpr std::size_t kPanel = ManyBlock<V>::kColumns;
  static constexpr std::size_t kChunk = VectorSizes<V>::kForwardChunk;  // words
  static constexpr std::size_t kTerms = Order::kTerms;
  using Tree = LaneTree<kLanes>;

  static constexpr std::size_t vectors_of(std::size_t rows) { return (rows + kLanes - 1) / kLanes; }

  // [lane, in the order of the tree][vector of the reduction][row], filled up with zeros.
  template <class T>
  static void pack(const PackJob& job) {
    const std::size_t width = vectors_of(job.rows) * kLanes;
    const std::size_t steps = vectors_of(job.count);
    float* out = reinterpret_cast<float*>(job.out);
    for (std::size_t r = 0; r < width; r += kLanes)
      for (std::size_t j = 0; j < steps; ++j) {
        const std::size_t k = j * kLanes;
        const std::size_t count = job.count - k < kLanes ? job.count - k : kLanes;
        F32 square[kLanes];
        for (std::size_t i = 0; i < kLanes; ++i)
          square[i] =
              r + i < job.rows
                  ? some(static_cast<const T*>(job.data) + (r + i) * job.stride + job.begin + k,
                         count)
                  : L::set(0.0f);
        Order::transpose(square);
        for (std::size_t l = 0; l < kLanes; ++l)
          L::store(out + (l * steps + j) * width + r, square[Tree::kOrder[l]]);
      }
  }

  // `count` elements, filled up with zeros.
  template <class T>
  [[gnu::always_inline]] static F32 some(const T* in, std::size_t count) {
    if (count == kLanes) return L::load_as(in);
    alignas(64) float wide[kLanes];
    widen<L>(in, count, wide);
    return L::load(wide);
  }

  // [row][kChunk], each vector in places.
  template <class F>
  [[gnu::noinline]] static void decode_whole(const DecodeJob& job, DType dtype, float* out) {
    const PackedView& packed = job.weight->packed;
    FewNumbers<F> numbers[kChunk / kFewUnit<F> + kLanes];
    for (std::size_t n = 0; n < job.width; ++n, out += kChunk) {
      const std::size_t row = job.first + n;
      const std::uint8_t* next =
          packed.values + few_bytes<F>(packed.element(row + kPanel, job.begin));
      prefetch_scales<F>(packed, row + kPanel, job.begin);
      for (std::size_t line = 0; line < few_bytes<F>(job.count); line += 64)
        V::prefetch_second(next + line);
      V::prefetch_second(next + few_bytes<F>(job.count) - 1);
      decode_units<F, Order>(
          packed, row, job.begin, job.count, dtype,
          numbers, [&](std::size_t v, F32 w) __attribute__((always_inline)) {
            L::store(out + v * kLanes, w);
          });
    }
  }

  template <class F, class T>
  static void decode(const DecodeJob& job) {
    using Unit = Decoded<F, T>;
    float* out = reinterpret_cast<float*>(job.out);
    if constexpr (kInRegisters<Unit>)
      if (begins_with_units<Unit>(*job.weight, job.begin, dtype_of<T>) &&
          job.count % kFewUnit<Unit> == 0)
        return decode_whole<Unit>(job, dtype_of<T>, out);
    placed_rows<RowsOf<F>, Order, T> (*job.weight)(*job.weight, dtype_of<T>, job.first, job.width,
                                                   job.begin, job.count, out, kChunk);
  }

  // kV vectors of rows by all columns of the panel. c: [column][kRows].
  template <std::size_t kV>
  [[gnu::noinline]] static void tile(const float* x, const float* panel, std::size_t steps,
                                     float* c, bool accumulate) {
    constexpr std::size_t kSums = kPanel * kV, kAhead = 16;  // steps
    // The sums of earlier chunks come from far away.
    for (std::size_t i = 0; accumulate && i < kSums; ++i)
      V::prefetch(c + i / kV * kRows + i % kV * kLanes);
    alignas(64) float waiting[Tree::kLevels + 1][kSums * kLanes];
    for (std::size_t l = 0; l < kLanes; ++l) {
      F32 sums[kPanel][kV];
      unrolled<kSums>([&](auto i)
                          __attribute__((always_inline)) { sums[i / kV][i % kV] = L::set(0.0f); });
      const float* w = panel + Order::place(Tree::kOrder[l]);
      for (std::size_t j = 0; j < steps; ++j, x += kV * kLanes, w += kLanes) {
        F32 rows[kV];
        unrolled<kV>([&](auto v) __attribute__((always_inline)) {
          rows[v] = L::load(x + v * kLanes);
          V::prefetch(x + (kAhead * kV + v) * kLanes);
        });
        unrolled<kPanel>([&](auto n) __attribute__((always_inline)) {
          const F32 one = L::set(w[n * kChunk]);
          unrolled<kV>([&](auto v) __attribute__((always_inline)) {
            sums[n][v] = Order::add_products(rows[v], one, sums[n][v]);
          });
        });
      }
      std::size_t level = 0;
      for (; (l >> level & 1) != 0; ++level)
        unrolled<kSums>([&](auto i) __attribute__((always_inline)) {
          sums[i / kV][i % kV] = L::add(L::load(waiting[level] + i * kLanes), sums[i / kV][i % kV]);
        });
      unrolled<kSums>([&](auto i) __attribute__((always_inline)) {
        L::store(waiting[level] + i * kLanes, sums[i / kV][i % kV]);
      });
    }
    for (std::size_t i = 0; i < kSums; ++i) {
      float* out = c + i / kV * kRows + i % kV * kLanes;
      const F32 total = L::load(waiting[Tree::kLevels] + i * kLanes);
      L::store(out, accumulate ? L::add(L::load(out), total) : total);
    }
  }

  // From [column][kRows] to rows.
  template <class T>
  [[gnu::noinline]] static void finish(const FinishJob& job) {
    const T* bias = static_cast<const T*>(job.bias);
    alignas(64) T columns[kPanel][kLanes];
    for (std::size_t r = 0; r < job.rows; r += kLanes) {
      for (std::size_t p = 0; p < job.width; ++p) {
        F32 sum = L::load(job.c + p * kRows + r);
        if (job.gain != nullptr) sum = L::mul(L::set(job.gain[p]), sum);
        if (bias != nullptr) sum = L::add(sum, L::set(to_float(bias[p])));
        L::store_as(columns[p], Order::one_nan(sum));
      }
      T* out = static_cast<T*>(job.out) + r * job.stride;
      const std::size_t rows = job.rows - r < kLanes ? job.rows - r : kLanes;
      for (std::size_t i = 0; i < rows; ++i, out += job.stride) {
        if (job.width == kPanel)
          unrolled<kPanel>([&](auto p) __attribute__((always_inline)) { out[p] = columns[p][i]; });
        else
          for (std::size_t p = 0; p < job.width; ++p) out[p] = columns[p][i];
      }
    }
  }

  template <class T>
  static void multiply(const MultiplyJob& job) {
    const float* x = reinterpret_cast<const float*>(job.left);
    const float* panel = reinterpret_cast<const float*>(job.panel);
    const std::size_t steps = (job.count + kLanes * kTerms - 1) / (kLanes * kTerms);
    const std::size_t vectors = vectors_of(job.rows);
    if (vectors == 1) tile<1>(x, panel, steps, job.c, job.accumulate);
    if constexpr (kVectors >= 2)
      if (vectors == 2) tile<2>(x, panel, steps, job.c, job.accumulate);
    if constexpr (kVectors >= 3)
      if (vectors == 3) tile<3>(x, panel, steps, job.c, job.accumulate);
    if (job.finish != nullptr) finish<T>(*job.finish);
  }
};

template <class Kernels, class T>
DecodeFn* many_decoder(Format format) {
  if (format == Int4Units::kFormat) return Kernels::template decode<Int4Units, T>;
  return find_decoder(PackedFormats{}, format,
                      []<class F>() -> DecodeFn* { return Kernels::template decode<F, T>; });
}

template <class V, class T, class Kernels = ManyForward<typename FewOrderOf<V, T>::Type>>
inline constexpr LinearKernels kManyForwardKernels = {
    .block = Kernels::kRows,
    .panel = Kernels::kPanel,
    .step = Kernels::kLanes,
    .chunk = Kernels::kChunk,
    .left_bytes = 4,
    .panel_step_bytes = Kernels::kPanel* Kernels::kLanes * sizeof(float),
    .pack = Kernels::template pack<T>,
    .multiply = Kernels::template multiply<T>,
    .decoder = many_decoder<Kernels, T>,
    .finish = Kernels::template finish<T>,
    .load_chunks = 1,
    .pass_rows = ManyBlock<V>::kPassRows,
    .few_rows = FewBlock<V>::kMost,
    .few = &kFewForwardKernels<V, T>};

}  // namespace monograph
