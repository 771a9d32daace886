// dx for few rows of the left operand, straight from packed bytes: chains of 16 rows of the weight
// in registers, their sums in the first-level cache. The order of summation is that of generic.h:
// chains of 16 terms, sixteen of them summed, then a chain over these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "monograph/kernels/linear/few_rows.h"
#include "monograph/simd/unrolled.h"

namespace monograph {

template <class Order>
struct FewDx {
  using V = typename Order::V;
  using L = typename Order::L;
  using F32 = typename L::F32;
  static constexpr auto& kCounts = FewBlock<V>::kDxCounts;
  static constexpr std::size_t kRows = last_of(kCounts);
  static constexpr std::size_t kLanes = L::kLanes;
  static constexpr std::size_t kPanel = FewBlock<V>::kDxPanel;
  static constexpr std::size_t kTerms = Order::kTerms;
  static constexpr std::size_t kChunk = VectorSizes<V>::kDxChunk * kTerms;
  static constexpr std::size_t kChain = VectorSizes<V>::kDxChain;
  // Vectors with accumulators, four at most, for kM rows of the left operand.
  template <std::size_t kM>
  static constexpr std::size_t kSteps = FewBlock<V>::kDxSums / kM >= 4   ? 4
                                        : FewBlock<V>::kDxSums / kM >= 2 ? 2
                                                                         : 1;
  template <std::size_t kM>
  static constexpr std::size_t kColumns = kSteps<kM>* kLanes;
  static constexpr std::size_t kPiece = 256;  // columns that are decoded to memory together
  static_assert(kPanel % kColumns<1> == 0 && kPiece % kColumns<1> == 0);

  // [reduction][row], filled up with rows of zeros.
  template <class T>
  static void pack(const PackJob& job) {
    pack_transposed<Order, T>(job, 0, filled_rows(job.rows, kCounts),
                              reinterpret_cast<float*>(job.out));
  }

  template <std::size_t kM>
  using Sums = F32[kM][kSteps<kM>];

  template <std::size_t kM>
  [[gnu::always_inline]] static void clear(Sums<kM>& sums) {
    constexpr std::size_t kWide = kSteps<kM>;
    unrolled<kM * kWide>([&](auto i) __attribute__((always_inline)) {
      sums[i / kWide][i % kWide] = L::set(0.0f);
    });
  }
  template <std::size_t kM>
  [[gnu::always_inline]] static void add_row(const F32 (&w)[kSteps<kM>], const float* g,
                                             Sums<kM>& sums) {
    unrolled<kM>([&](auto m) __attribute__((always_inline)) {
      const F32 one = L::set(g[m]);
      unrolled<kSteps<kM>>([&](auto t) __attribute__((always_inline)) {
        sums[m][t] = Order::add_products(one, w[t], sums[m][t]);
      });
    });
  }
  template <std::size_t kM>
  [[gnu::always_inline]] static void add_chain(const Sums<kM>& sums, float* totals, bool first) {
    constexpr std::size_t kWide = kSteps<kM>;
    unrolled<kM * kWide>([&](auto i) __attribute__((always_inline)) {
      float* out = totals + i / kWide * kPanel + i % kWide * kLanes;
      const F32 had = first ? L::set(0.0f) : L::load(out);
      L::store(out, L::add(had, sums[i / kWide][i % kWide]));
    });
  }

  // The vectors [from, to) of kWide of a row, whose first byte is p.
  template <class F, std::size_t kWide, class Prepared>
  [[gnu::always_inline]] static void decode(const Prepared& unit, const std::uint8_t* p,
                                            std::size_t from, std::size_t to, F32 (&w)[kWide]) {
    using Decoder = FewDecoder<F, Order>;
    constexpr std::size_t kTogether = Decoder::kTogether;
    static_assert(kWide % kTogether == 0);
    unrolled<kWide / kTogether>([&](auto g) __attribute__((always_inline)) {
      constexpr std::size_t first = g * kTogether;
      if (first < from || first >= to) return;
      F32 some[kTogether];
      Decoder::decode(unit, p + few_bytes<F>(first * kLanes), some);
      unrolled<kTogether>([&](auto t) __attribute__((always_inline)) { w[first + t] = some[t]; });
    });
  }

  // `rows` rows of the weight, `stride` bytes apart, by `columns` of them.
  template <class F, std::size_t kM>
  [[gnu::noinline]] static void chain(const std::uint8_t* values, std::size_t stride,
                                      const FewNumbers<F>* numbers,  // [row][kPanel / kUnit]
                                      DType dtype, std::size_t rows, std::size_t columns,
                                      const float* g, float* totals, bool first) {
    using Decoder = FewDecoder<F, Order>;
    constexpr std::size_t kUnit = kFewUnit<F>, kUnitBytes = few_bytes<F>(kUnit);
    constexpr std::size_t kWide = kSteps<kM>, kColumns = FewDx::kColumns<kM>;
    if constexpr (kUnit > kColumns) {
      // Several steps of a unit: what its elements have in common is kept for all rows.
      for (std::size_t u = 0; u < columns / kUnit; ++u) {
        typename Decoder::Prepared prepared[kChain];
        const std::uint8_t* p = values + u * kUnitBytes;
        for (std::size_t i = 0; i < rows; ++i) {
          const auto* next = reinterpret_cast<const char*>(p + (i + kChain) * stride);
          for (std::size_t line = 0; line < kUnitBytes; line += 64) V::prefetch(next + line);
          if (u + 1 == columns / kUnit) V::prefetch(next + kUnitBytes - 1);
          Decoder::prepare(numbers[i * (kPanel / kUnit) + u], dtype, p + i * stride, prepared[i]);
        }
        for (std::size_t part = 0; part < kUnit; part += kColumns) {
          Sums<kM> sums;
          clear<kM>(sums);
          const std::uint8_t* row = p + few_bytes<F>(part);
          for (std::size_t i = 0; i < rows; ++i, row += stride) {
            F32 w[kWide];
            decode<F, kWide>(prepared[i], row, 0, kWide, w);
            add_row<kM>(w, g + i * kM, sums);
          }
          add_chain<kM>(sums, totals + u * kUnit + part, first);
        }
      }
    } else {
      constexpr std::size_t kUnits = kColumns / kUnit, kVectors = kUnit / kLanes;
      for (std::size_t col = 0; col < columns; col += kColumns) {
        Sums<kM> sums;
        clear<kM>(sums);
        const std::uint8_t* row = values + few_bytes<F>(col);
        for (std::size_t i = 0; i < rows; ++i, row += stride) {
          if (few_bytes<F>(col) % 64 < few_bytes<F>(kColumns)) {
            // Both lines where values lie across them.
            const std::uint8_t* next = row + kChain * stride;
            if (col == 0) V::prefetch(next);
            V::prefetch(next + 63);
          }
          F32 w[kWide];
          unrolled<kUnits>([&](auto u) __attribute__((always_inline)) {
            typename Decoder::Prepared prepared;
            Decoder::prepare(numbers[i * (kPanel / kUnit) + col / kUnit + u], dtype,
                             row + u * kUnitBytes, prepared);
            decode<F, kWide>(prepared, row, u * kVectors, (u + 1) * kVectors, w);
          });
          add_row<kM>(w, g + i * kM, sums);
        }
        add_chain<kM>(sums, totals + col, first);
      }
    }
  }

  // The same from memory: kColumns of `rows` words of rows, [word][kPiece], in places.
  template <std::size_t kM>
  [[gnu::noinline]] static void buffered_chain(const float* buffer, std::size_t rows,
                                               const float* g, float* totals, bool first) {
    constexpr std::size_t kWide = kSteps<kM>;
    Sums<kM> sums;
    clear<kM>(sums);
    for (std::size_t i = 0; i < rows; ++i, buffer += kPiece) {
      F32 w[kWide];
      unrolled<kWide>([&](auto t)
                          __attribute__((always_inline)) { w[t] = L::load(buffer + t * kLanes); });
      add_row<kM>(w, g + i * kM, sums);
    }
    add_chain<kM>(sums, totals, first);
  }

  // Columns of the panel whose units the decoder knows.
  template <class F, std::size_t kM>
  [[gnu::always_inline]] static std::size_t whole_units(const FewJob& job) {
    constexpr std::size_t kUnit = kFewUnit<F>, kColumns = FewDx::kColumns<kM>;
    constexpr std::size_t kWhole = kUnit > kColumns ? kUnit : kColumns;
    return begins_with_units<F>(*job.decode.weight, job.decode.first, job.dtype)
               ? job.decode.width / kWhole * kWhole
               : 0;
  }

  // Columns of the panel from `done` on, of any weight.
  template <std::size_t kM>
  [[gnu::noinline]] static void buffered_columns(const FewJob& job, std::size_t row,
                                                 std::size_t rows, std::size_t done, const float* g,
                                                 float* totals, bool first) {
    constexpr std::size_t kColumns = FewDx::kColumns<kM>;
    alignas(64) float buffer[kChain * kPiece];
    const DecodeJob& decode = job.decode;
    if (decode.width % kColumns != 0) std::memset(buffer, 0, sizeof buffer);
    for (std::size_t p = done; p < decode.width; p += kPiece) {
      const std::size_t count = decode.width - p < kPiece ? decode.width - p : kPiece;
      job.place_rows(*decode.weight, job.dtype, row, rows, decode.first + p, count, buffer, kPiece);
      for (std::size_t col = 0; col < count; col += kColumns)
        buffered_chain<kM>(buffer + col, (rows + kTerms - 1) / kTerms, g, totals + p + col, first);
    }
  }

  template <class F, std::size_t kM>
  static void panel(const FewJob& job) {
    [[maybe_unused]] constexpr std::size_t kUnit = kFewUnit<F>;
    const DecodeJob& decode = job.decode;
    [[maybe_unused]] const PackedView& packed = decode.weight->packed;
    const float* g = reinterpret_cast<const float*>(job.multiply.left);
    alignas(64) float totals[kM * kPanel];
    const std::size_t whole = whole_units<F, kM>(job);
    constexpr std::size_t kRowsOfChain = kChain * kTerms;
    for (std::size_t i = 0; i < decode.count; i += kRowsOfChain, g += kChain * kM) {
      const std::size_t rows = decode.count - i < kRowsOfChain ? decode.count - i : kRowsOfChain;
      const std::size_t row = decode.begin + i;
      if constexpr (kInRegisters<F>)
        if (whole != 0) {
          FewNumbers<F> numbers[kChain * (kPanel / kUnit) + kLanes];
          unit_numbers<F, Order>(packed, row, rows, decode.first, whole / kUnit, numbers,
                                 kPanel / kUnit);
          chain<F, kM>(packed.values + few_bytes<F>(packed.element(row, decode.first)),
                       few_bytes<F>(packed.cols), numbers, job.dtype, rows, whole, g, totals,
                       i == 0);
        }
      buffered_columns<kM>(job, row, rows, whole, g, totals, i == 0);
    }
    for (std::size_t m = 0; m < kM; ++m)
      for (std::size_t p = 0; p < decode.width; p += kLanes) {
        float* out = job.multiply.c + m * kPanel + p;
        const F32 total = Order::from_places(L::load(totals + m * kPanel + p));
        L::store(out, job.multiply.accumulate ? L::add(L::load(out), total) : total);
      }
  }
};

template <class V, class T, class Kernels = FewDx<typename FewOrderOf<V, T>::Type>>
inline constexpr LinearKernels kFewDxKernels = {.block = Kernels::kRows,
                                                .panel = Kernels::kPanel,
                                                .step = 1,
                                                .chunk = Kernels::kChunk,
                                                .left_bytes = 4,
                                                .panel_step_bytes = 64,
                                                .pack = Kernels::template pack<T>,
                                                .multiply = multiply_nothing<Kernels, V, T>,
                                                .decoder = dx_decoder<V, T>,
                                                .finish = finish_rows<V, T, Kernels::kPanel>,
                                                .load_chunks = 1,
                                                .direct = few_direct<Kernels, V, T>};

}  // namespace monograph
