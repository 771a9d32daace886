// Products of bf16 pairs, for a vocabulary V that has add_pairs(): the loops of few_forward.h,
// many_forward.h, few_dx.h and many_dx.h over words of two terms of the reduction. The order of
// summation is theirs in words: forward, word 16 j + i has the terms 32 j + i and, first to be
// added, 32 j + 16 + i; chunks are 1024 terms. For dx, word i has the terms 2 i and, first to be
// added, 2 i + 1; chains are 32 terms, chunks 512.
//
// Weights are decoded by the unit of AVX-512, to floats, whose upper halves are joined: no format
// is compiled a second time.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "monograph/kernels/linear/few_decode_avx512.h"
#include "monograph/kernels/linear/many_dx.h"
#include "monograph/kernels/linear/many_forward.h"

namespace monograph {

template <>
const LinearKernels* find_linear<simd::Avx512>(DType dtype, Pass pass);

template <class V>
concept MultipliesPairs = requires(__m512 x) {
  V::add_pairs(x, x, x);
};

template <MultipliesPairs W>
struct PairOrder : FewOrder<simd::Avx512> {
  using V = W;
  static constexpr std::size_t kTerms = 2;
  [[gnu::always_inline]] static __m512 add_products(__m512 x, __m512 w, __m512 sum) {
    return V::add_pairs(x, w, sum);
  }
};
template <MultipliesPairs V, class T>
struct FewOrderOf<V, T> {
  using Type = PairOrder<V>;
};

// As those of AVX-512, in words.
template <MultipliesPairs V>
struct RegisterBlock<V> {
  using L = Lanes<simd::Avx512>;
};
template <MultipliesPairs V>
struct FewBlock<V> {
  static constexpr std::size_t kMost = 12, kCounts[] = {1, 4, 12}, kSums = 24;
  static constexpr std::size_t kDxMost = 16, kDxCounts[] = {1, 4, 8, 16}, kDxSums = 24;
  static constexpr std::size_t kDxPanel = 512;
};
template <MultipliesPairs V>
struct ManyBlock<V> {
  static constexpr std::size_t kVectors = 3, kColumns = 8, kPassRows = 240;
  static constexpr std::size_t kDxRows = 6, kDxVectors = 4, kDxDepth = 64;
};

// Two vectors of floats that are bf16 numbers.
[[gnu::always_inline]] inline __m512 joined(__m512 first, __m512 second) {
  constexpr int kUpperOrOther = 0xec;  // (a & c) | b
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
      _mm512_castps_si512(second), _mm512_srli_epi32(_mm512_castps_si512(first), 16),
      _mm512_set1_epi32(-65536), kUpperOrOther));
}

// Floats of rows of a weight, kRows by kColumns at a time.
template <class V>
struct DecodedRows {
  static constexpr std::size_t kRows = 8, kColumns = 512;  // the chunk of AVX-512

  // use(row, col, floats, rows, count) for parts of an area: floats is [row][kColumns], in places,
  // rows filled up with zeros to whole vectors.
  template <class Use>
  [[gnu::always_inline]] static void walk(const LinearWeight& weight, std::size_t first,
                                          std::size_t rows, std::size_t begin, std::size_t count,
                                          Use use) {
    DecodeFn* const decode =
        find_linear<simd::Avx512>(DType::kBFloat16, Pass::kForward)->decoder(weight.packed.format);
    alignas(64) float floats[kRows * kColumns];
    for (std::size_t r = 0; r < rows; r += kRows)
      for (std::size_t c = 0; c < count; c += kColumns) {
        const std::size_t some = rows - r < kRows ? rows - r : kRows;
        const std::size_t wide = count - c < kColumns ? count - c : kColumns;
        decode({&weight, first + r, some, begin + c, wide, reinterpret_cast<std::byte*>(floats),
                nullptr});
        use(r, c, floats, some, wide);
      }
  }
};

// [row][stride] words: two vectors of a row become one.
template <class V>
[[gnu::noinline]] void place_row_pairs(const LinearWeight& weight, DType, std::size_t first,
                                       std::size_t rows, std::size_t begin, std::size_t count,
                                       float* out, std::size_t stride) {
  using Rows = DecodedRows<V>;
  Rows::walk(
      weight, first, rows, begin, count,
      [&](std::size_t row, std::size_t col, const float* floats, std::size_t some, std::size_t wide)
          __attribute__((always_inline)) {
            for (std::size_t r = 0; r < some; ++r)
              for (std::size_t k = 0; k < wide; k += 32) {
                const float* const in = floats + r * Rows::kColumns + k;
                const __m512 second = k + 16 < wide ? _mm512_load_ps(in + 16) : _mm512_setzero_ps();
                _mm512_storeu_ps(out + (row + r) * stride + (col + k) / 2,
                                 joined(_mm512_load_ps(in), second));
              }
          });
}

// Two rows become one: store(row, vector, words). An odd last row is joined with zeros.
template <class V, class Store>
[[gnu::always_inline]] inline void column_pairs(const LinearWeight& weight, std::size_t first,
                                                std::size_t rows, std::size_t begin,
                                                std::size_t count, Store store) {
  using Rows = DecodedRows<V>;
  Rows::walk(
      weight, first, rows, begin, count,
      [&](std::size_t row, std::size_t col, const float* floats, std::size_t some, std::size_t wide)
          __attribute__((always_inline)) {
            for (std::size_t r = 0; r < some; r += 2)
              for (std::size_t k = 0; k < wide; k += 16) {
                const float* const in = floats + r * Rows::kColumns + k;
                const __m512 second =
                    r + 1 < some ? _mm512_load_ps(in + Rows::kColumns) : _mm512_setzero_ps();
                store((row + r) / 2, (col + k) / 16, joined(_mm512_load_ps(in), second));
              }
          });
}
template <class V>
[[gnu::noinline]] void place_column_pairs(const LinearWeight& weight, DType, std::size_t first,
                                          std::size_t rows, std::size_t begin, std::size_t count,
                                          float* out, std::size_t stride) {
  column_pairs<V>(
      weight, first, rows, begin,
      count, [&](std::size_t row, std::size_t vector, __m512 words) __attribute__((always_inline)) {
        _mm512_storeu_ps(out + row * stride + vector * 16, words);
      });
}

template <class V>
struct PairsForward {
  using Order = PairOrder<V>;
  using Few = FewForward<Order>;
  using Many = ManyForward<Order>;

  // Words of `count` elements, at most 32.
  [[gnu::always_inline]] static __m512 words(const Bf16* in, std::size_t count) {
    return joined(Many::some(in, count < 16 ? count : 16),
                  count > 16 ? Many::some(in + 16, count - 16) : _mm512_setzero_ps());
  }
  [[gnu::always_inline]] static __m512 words_at(const PackJob& job, std::size_t row,
                                                std::size_t k) {
    if (row >= job.rows) return _mm512_setzero_ps();
    const Bf16* const in = static_cast<const Bf16*>(job.data) + row * job.stride + job.begin + k;
    return words(in, job.count - k < 32 ? job.count - k : 32);
  }

  // As FewForward::pack().
  static void pack_few(const PackJob& job) {
    const std::size_t rows = filled_rows(job.rows, Few::kCounts);
    float* out = reinterpret_cast<float*>(job.out);
    for (std::size_t k = 0; k < job.count; k += 32)
      for (std::size_t r = 0; r < rows; ++r, out += 16)
        _mm512_storeu_ps(out, Order::to_places(words_at(job, r, k)));
  }
  // As ManyForward::pack().
  static void pack(const PackJob& job) {
    const std::size_t width = Many::vectors_of(job.rows) * 16, steps = (job.count + 31) / 32;
    float* out = reinterpret_cast<float*>(job.out);
    for (std::size_t r = 0; r < width; r += 16)
      for (std::size_t j = 0; j < steps; ++j) {
        __m512 square[16];
        for (std::size_t i = 0; i < 16; ++i) square[i] = words_at(job, r + i, 32 * j);
        Order::transpose(square);
        for (std::size_t l = 0; l < 16; ++l)
          _mm512_storeu_ps(out + (l * steps + j) * width + r, square[Many::Tree::kOrder[l]]);
      }
  }
  static void decode(const DecodeJob& job) {
    place_row_pairs<V>(*job.weight, DType::kBFloat16, job.first, job.width, job.begin, job.count,
                       reinterpret_cast<float*>(job.out), Many::kChunk);
  }
};

template <class V>
struct PairsDx {
  using Order = PairOrder<V>;
  using Few = FewDx<Order>;
  using Many = ManyDx<Order>;

  // `width` rows from `first` on as [word][row], filled up with zeros.
  [[gnu::noinline]] static void pack_rows(const PackJob& job, std::size_t first, std::size_t width,
                                          std::byte* out) {
    const std::size_t rows = job.rows - first < width ? job.rows - first : width;
    for (std::size_t i = 0; i < job.count; i += 2)
      for (std::size_t r = 0; r < width; ++r, out += 4) {
        const Bf16* const in =
            static_cast<const Bf16*>(job.data) + (first + r) * job.stride + job.begin + i;
        std::memset(out, 0, 4);
        if (r < rows) std::memcpy(out, in, i + 1 < job.count ? 4 : 2);
      }
  }
  static void pack_few(const PackJob& job) {
    pack_rows(job, 0, filled_rows(job.rows, Few::kCounts), job.out);
  }
  static void pack(const PackJob& job) {
    std::byte* out = job.out;
    for (std::size_t r = 0; r < job.rows; r += Many::kSubRows) {
      pack_rows(job, r, Many::kSubRows, out);
      out += (job.count + 1) / 2 * Many::kSubRows * sizeof(float);
    }
  }
  static void decode(const DecodeJob& job) {
    float* const out = reinterpret_cast<float*>(job.out);
    column_pairs<V>(
        *job.weight, job.begin, job.count, job.first, job.width,
        [&](std::size_t row, std::size_t vector, __m512 words) __attribute__((always_inline)) {
          _mm512_storeu_ps(Many::place(out, row, vector), words);
        });
  }
};

template <class Pairs>
DecodeFn* pairs_decoder(Format format) {
  const LinearKernels* const floats = find_linear<simd::Avx512>(DType::kBFloat16, Pass::kForward);
  return floats->decoder(format) == nullptr ? nullptr : Pairs::decode;
}

template <class V, class Kernels, PlacedRowsFn* kPlace>
void multiply_few_pairs(const MultiplyJob& multiply, const DecodeJob& decode) {
  multiply_placed<Kernels, V, ByRows, Bf16>({multiply, decode, DType::kBFloat16, kPlace});
}
template <class V, class Kernels, PlacedRowsFn* kPlace>
DirectFn* few_pairs_direct(const DecodeJob&) {
  return multiply_few_pairs<V, Kernels, kPlace>;
}

template <class V, class Pairs = PairsForward<V>, class Few = typename Pairs::Few>
inline constexpr LinearKernels kFewForwardPairs = {
    .block = Few::kRows,
    .panel = Few::kPanel,
    .step = 32,
    .chunk = Few::kJob,
    .left_bytes = 2,
    .panel_step_bytes = 64,
    .pack = Pairs::pack_few,
    .multiply = multiply_nothing<Few, V, Bf16>,
    .decoder = pairs_decoder<Pairs>,
    .finish = finish_rows<V, Bf16, Few::kPanel>,
    .direct = few_pairs_direct<V, Few, place_row_pairs<V>>};

template <class V, class Pairs = PairsForward<V>, class Many = typename Pairs::Many>
inline constexpr LinearKernels kForwardPairs = {.block = Many::kRows,
                                                .panel = Many::kPanel,
                                                .step = 32,
                                                .chunk = 2 * Many::kChunk,
                                                .left_bytes = 2,
                                                .panel_step_bytes = Many::kPanel * 64,
                                                .pack = Pairs::pack,
                                                .multiply = Many::template multiply<Bf16>,
                                                .decoder = pairs_decoder<Pairs>,
                                                .finish = Many::template finish<Bf16>,
                                                .load_chunks = 1,
                                                .pass_rows = ManyBlock<V>::kPassRows,
                                                .few_rows = FewBlock<V>::kMost,
                                                .few = &kFewForwardPairs<V>};

template <class V, class Pairs = PairsDx<V>, class Few = typename Pairs::Few>
inline constexpr LinearKernels kFewDxPairs = {
    .block = Few::kRows,
    .panel = Few::kPanel,
    .step = 2,
    .chunk = Few::kChunk,
    .left_bytes = 2,
    .panel_step_bytes = 64,
    .pack = Pairs::pack_few,
    .multiply = multiply_nothing<Few, V, Bf16>,
    .decoder = pairs_decoder<Pairs>,
    .finish = finish_rows<V, Bf16, Few::kPanel>,
    .load_chunks = 1,
    .direct = few_pairs_direct<V, Few, place_column_pairs<V>>};

template <class V, class Pairs = PairsDx<V>, class Many = typename Pairs::Many>
inline constexpr LinearKernels kDxPairs = {.block = Many::kRows,
                                           .panel = Many::kPanel,
                                           .step = 2,
                                           .chunk = 2 * Many::kChunk,
                                           .left_bytes = 2,
                                           .panel_step_bytes = Many::kPanel * sizeof(float),
                                           .pack = Pairs::pack,
                                           .multiply = Many::template multiply<Bf16>,
                                           .decoder = pairs_decoder<Pairs>,
                                           .finish = Many::template finish<Bf16>,
                                           .load_chunks = 1,
                                           .pass_rows = ManyBlock<V>::kPassRows,
                                           .few_rows = FewBlock<V>::kDxMost,
                                           .few = &kFewDxPairs<V>};

// fp16 and fp32 run on AVX-512.
template <MultipliesPairs V>
const LinearKernels* find_pairs(DType dtype, Pass pass) {
  static_assert(kForwardPairs<V>.has_sizes() && kFewForwardPairs<V>.has_sizes());
  static_assert(kDxPairs<V>.has_sizes() && kFewDxPairs<V>.has_sizes());
  if (dtype != DType::kBFloat16) return nullptr;
  return pass == Pass::kForward ? &kForwardPairs<V> : &kDxPairs<V>;
}

}  // namespace monograph
