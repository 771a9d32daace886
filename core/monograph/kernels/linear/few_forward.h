// Forward for few rows of the left operand, straight from packed bytes: a weight is decoded in
// registers and multiplied there, and no panel goes through memory. The order of summation is that
// of generic.h: chunks of 32 vectors, lanes apart, a tree over the lanes, a chain over the chunks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "monograph/kernels/linear/few_rows.h"
#include "monograph/simd/unrolled.h"

namespace monograph {

template <class Order>
struct FewForward {
  using V = typename Order::V;
  using L = typename Order::L;
  using F32 = typename L::F32;
  static constexpr auto& kCounts = FewBlock<V>::kCounts;
  static constexpr std::size_t kRows = last_of(kCounts);
  static constexpr std::size_t kLanes = L::kLanes;
  static constexpr std::size_t kTerms = Order::kTerms;
  static constexpr std::size_t kChunk = VectorSizes<V>::kForwardChunk * kTerms;
  static constexpr std::size_t kPanel = 32;
  static constexpr std::size_t kJob = 4096;  // of the reduction
  static constexpr std::size_t kSegmentBytes = 16 << 10;

  static constexpr std::size_t words_of(std::size_t count) { return (count + kTerms - 1) / kTerms; }

  // [vector][row][lane], in places, filled up with rows of zeros.
  template <class T>
  static void pack(const PackJob& job) {
    const std::size_t rows = filled_rows(job.rows, kCounts);
    float* out = reinterpret_cast<float*>(job.out);
    for (std::size_t k = 0; k < job.count; k += kLanes)
      for (std::size_t r = 0; r < rows; ++r, out += kLanes) {
        F32 x = L::set(0.0f);
        if (r < job.rows) {
          const T* in = static_cast<const T*>(job.data) + r * job.stride + job.begin + k;
          if (k + kLanes <= job.count) {
            x = L::template load_as<T>(in);
          } else {
            float tail[kLanes];
            widen<L>(in, job.count - k, tail);
            x = L::load(tail);
          }
        }
        L::store(out, Order::to_places(x));
      }
  }

  // kM rows of the left operand by kW of the weight.
  template <std::size_t kM>
  static constexpr std::size_t kWeightRows = FewBlock<V>::kSums / kM >= 4   ? 4
                                             : FewBlock<V>::kSums / kM >= 2 ? 2
                                                                            : 1;
  template <std::size_t kM>
  using Sums = F32[kM][kWeightRows<kM>];

  template <std::size_t kM>
  [[gnu::always_inline]] static void clear(Sums<kM>& sums) {
    constexpr std::size_t kW = kWeightRows<kM>;
    unrolled<kM * kW>([&](auto i)
                          __attribute__((always_inline)) { sums[i / kW][i % kW] = L::set(0.0f); });
  }
  template <std::size_t kM>
  [[gnu::always_inline]] static void add_lanes(const Sums<kM>& sums, std::size_t rows, float* c,
                                               bool accumulate) {
    constexpr std::size_t kW = kWeightRows<kM>;
    static_assert(kM * kW % 4 == 0);
    // Four sums at a time, of whatever rows.
    unrolled<kM * kW / 4>([&](auto g) __attribute__((always_inline)) {
      F32 ordered[4];
      unrolled<4>([&](auto i) __attribute__((always_inline)) {
        constexpr std::size_t at = g * 4 + i;
        ordered[i] = Order::from_places(sums[at / kW][at % kW]);
      });
      float total[4];
      L::sum4(ordered, total);
      unrolled<4>([&](auto i) __attribute__((always_inline)) {
        constexpr std::size_t at = g * 4 + i;
        if (at % kW >= rows) return;
        float* out = c + at / kW * kPanel + at % kW;
        *out = accumulate ? *out + total[i] : total[i];
      });
    });
  }

  // Or the compiler loads x once for all rows of the weight, and spills sums to make room for it.
  [[gnu::always_inline]] static void keep_loads_apart() { asm volatile("" ::: "memory"); }

  template <class F>
  struct Piece {
    const std::uint8_t* rows[4];      // first bytes
    const FewNumbers<F>* numbers[4];  // of their units
    std::size_t ahead;                // bytes to what comes next
    DType dtype;
  };

  // `count` elements, whole chunks.
  template <class F, std::size_t kM>
  [[gnu::noinline]] static void dots(const Piece<F>& piece, const float* x, std::size_t count,
                                     float* c, bool accumulate) {
    using Decoder = FewDecoder<F, Order>;
    constexpr std::size_t kW = kWeightRows<kM>, kTogether = Decoder::kTogether;
    constexpr std::size_t kUnit = kFewUnit<F>, kVectors = kUnit / kLanes;
    constexpr std::size_t kUnitBytes = few_bytes<F>(kUnit);
    constexpr std::size_t kStep = kUnitBytes < 64 ? 64 / kUnitBytes : 1;  // units of a line
    static_assert(kChunk % (kUnit * kStep) == 0 && kVectors % kTogether == 0);
    std::size_t unit = 0;
    for (std::size_t k = 0; k < count; k += kChunk) {
      Sums<kM> sums;
      clear<kM>(sums);
      for (std::size_t step = 0; step < kChunk / (kUnit * kStep); ++step) {
        unrolled<kW>([&](auto r) __attribute__((always_inline)) {
          const std::uint8_t* next = piece.rows[r] + unit * kUnitBytes + piece.ahead;
          for (std::size_t line = 0; line < kUnitBytes * kStep; line += 64)
            V::prefetch(next + line);
        });
        for (std::size_t u = 0; u < kStep; ++u, ++unit, x += kUnit * kM) {
          typename Decoder::Prepared prepared[kW];
          unrolled<kW>([&](auto r) __attribute__((always_inline)) {
            Decoder::prepare(piece.numbers[r][unit], piece.dtype, piece.rows[r] + unit * kUnitBytes,
                             prepared[r]);
          });
          // A decoded piece at a time through the rows: no chain waits for its own last step.
          unrolled<kVectors / kTogether>([&](auto g) __attribute__((always_inline)) {
            constexpr std::size_t first = g * kTogether;
            unrolled<kW>([&](auto r) __attribute__((always_inline)) {
              F32 w[kTogether];
              Decoder::decode(prepared[r],
                              piece.rows[r] + unit * kUnitBytes + few_bytes<F>(first * kLanes), w);
              unrolled<kTogether * kM>([&](auto i) __attribute__((always_inline)) {
                constexpr std::size_t t = i / kM, m = i % kM;
                const float* at = x + ((first + t) * kM + m) * kLanes;
                sums[m][r] = Order::add_products(L::load(at), w[t], sums[m][r]);
              });
              keep_loads_apart();
            });
          });
        }
      }
      add_lanes<kM>(sums, kW, c, accumulate || k != 0);
    }
  }

  // At most a chunk of `rows` rows, from memory: [row][words of a chunk], in places.
  template <std::size_t kM>
  [[gnu::noinline]] static void buffered_dots(const float* buffer, std::size_t rows,
                                              std::size_t count, const float* x, float* c,
                                              bool accumulate) {
    Sums<kM> sums;
    clear<kM>(sums);
    for (std::size_t k = 0; k < words_of(count); k += kLanes, x += kLanes * kM)
      unrolled<kWeightRows<kM>>([&](auto r) __attribute__((always_inline)) {
        const F32 w = L::load(buffer + (r < rows ? r : 0) * words_of(kChunk) + k);
        unrolled<kM>([&](auto m) __attribute__((always_inline)) {
          sums[m][r] = Order::add_products(L::load(x + m * kLanes), w, sums[m][r]);
        });
      });
    add_lanes<kM>(sums, rows, c, accumulate);
  }

  // `count` elements from `begin` of the job on, whole chunks, of kW rows from row n on.
  template <class F, std::size_t kM>
  static void whole_chunks(const FewJob& job, std::size_t n, std::size_t begin, std::size_t count) {
    constexpr std::size_t kW = kWeightRows<kM>;
    const DecodeJob& decode = job.decode;
    const PackedView& packed = decode.weight->packed;
    constexpr std::size_t kNumbers = kJob / kFewUnit<F> + kLanes;
    FewNumbers<F> numbers[kW * kNumbers];
    Piece<F> piece = {{}, {}, kW * few_bytes<F>(packed.cols), job.dtype};
    const std::size_t first = decode.first + n, col = decode.begin + begin;
    unit_numbers<F, Order>(packed, first, kW, col, count / kFewUnit<F>, numbers, kNumbers);
    for (std::size_t r = 0; r < kW; ++r) {
      prefetch_scales<F>(packed, first + kW + r, col);
      piece.rows[r] = packed.values + few_bytes<F>(packed.element(first + r, col));
      piece.numbers[r] = numbers + r * kNumbers;
    }
    dots<F, kM>(piece, reinterpret_cast<const float*>(job.multiply.left) + begin * kM, count,
                job.multiply.c + n, job.multiply.accumulate || begin != 0);
  }

  // At most a chunk of `rows` rows from row n on: any weight, from anywhere.
  template <std::size_t kM>
  [[gnu::noinline]] static void any_chunk(const FewJob& job, std::size_t n, std::size_t rows,
                                          std::size_t begin, std::size_t count) {
    alignas(64) float buffer[kWeightRows<kM> * words_of(kChunk)];
    const DecodeJob& decode = job.decode;
    job.place_rows(*decode.weight, job.dtype, decode.first + n, rows, decode.begin + begin, count,
                   buffer, words_of(kChunk));
    buffered_dots<kM>(buffer, rows, count,
                      reinterpret_cast<const float*>(job.multiply.left) + words_of(begin) * kM,
                      job.multiply.c + n, job.multiply.accumulate || begin != 0);
  }

  // A segment of the left operand stays in the first-level cache while the panel's rows pass.
  template <class F, std::size_t kM>
  static void panel(const FewJob& job) {
    constexpr std::size_t kW = kWeightRows<kM>;
    constexpr std::size_t kFit = kSegmentBytes / sizeof(float) / kM / words_of(kChunk);
    constexpr std::size_t kSegment = (kFit == 0 ? 1 : kFit) * kChunk;
    const DecodeJob& decode = job.decode;
    [[maybe_unused]] const bool known =
        begins_with_units<F>(*decode.weight, decode.begin, job.dtype);
    for (std::size_t k = 0; k < decode.count; k += kSegment) {
      const std::size_t count = decode.count - k < kSegment ? decode.count - k : kSegment;
      for (std::size_t n = 0; n < decode.width; n += kW) {
        const std::size_t rows = decode.width - n < kW ? decode.width - n : kW;
        std::size_t done = 0;
        if constexpr (kInRegisters<F>)
          if (known && rows == kW && count >= kChunk) {
            done = count / kChunk * kChunk;
            whole_chunks<F, kM>(job, n, k, done);
          }
        for (; done < count; done += kChunk)
          any_chunk<kM>(job, n, rows, k + done, count - done < kChunk ? count - done : kChunk);
      }
    }
  }
};

template <class V, class T, class Kernels = FewForward<typename FewOrderOf<V, T>::Type>>
inline constexpr LinearKernels kFewForwardKernels = {.block = Kernels::kRows,
                                                     .panel = Kernels::kPanel,
                                                     .step = Kernels::kLanes,
                                                     .chunk = Kernels::kJob,
                                                     .left_bytes = 4,
                                                     .panel_step_bytes = 64,
                                                     .pack = Kernels::template pack<T>,
                                                     .multiply = multiply_nothing<Kernels, V, T>,
                                                     .decoder = forward_decoder<V, T>,
                                                     .finish = finish_rows<V, T, Kernels::kPanel>,
                                                     .direct = few_direct<Kernels, V, T>};

}  // namespace monograph
