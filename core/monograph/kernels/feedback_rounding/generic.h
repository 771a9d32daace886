// The algorithm, once, for every format, in vectors as GCC and clang know them, of the width of the
// unit's instruction set.
#pragma once

#include <bit>

#include "monograph/base/float_types.h"
#include "monograph/base/minifloat.h"
#include "monograph/cpu/tags.h"
#include "monograph/formats/all.h"
#include "monograph/kernels/feedback_rounding/feedback_rounding.h"
#include "monograph/simd/unrolled.h"

namespace monograph {

// The sixteen values of a 4-bit format in ascending order, and between them the bounds above which
// the next one is nearer.
template <class F>
struct AscendingValues {
  float values[16], bounds[15];
  std::uint32_t codes[16];
  constexpr AscendingValues() : values{}, bounds{}, codes{} {
    for (std::uint32_t i = 0; i < 16; ++i) {
      if constexpr (requires { F::kOrder; })
        codes[i] = F::kOrder[i];
      else
        codes[i] = i < 8 ? 15 - i : i - 8;
      values[i] = F::kValues[codes[i]];
    }
    for (int i = 0; i < 15; ++i) bounds[i] = (values[i] + values[i + 1]) / 2.0f;
    // Of two zeros that differ in sign only, +0 is taken.
    if constexpr (!requires { F::kOrder; }) bounds[7] = bounds[6];
  }
};
template <class F>
inline constexpr AscendingValues<F> kAscending{};

template <std::size_t kBytes>
struct VectorTypes {
  static constexpr std::size_t kDoubles = kBytes / sizeof(double), kFloats = kBytes / sizeof(float);
  typedef double Double __attribute__((vector_size(kBytes)));
  typedef float Float __attribute__((vector_size(kBytes)));
  typedef std::uint32_t Word __attribute__((vector_size(kBytes)));
  typedef float Half __attribute__((vector_size(kBytes / 2)));  // as many floats as Double has
};
template <class V>
using VectorsOf = VectorTypes<isa_of<V> == Isa::kScalar ? 16
                              : isa_of<V> == Isa::kAvx2 ? 32
                                                        : 64>;

template <class Vector>
[[gnu::always_inline]] inline Vector load_vector(const void* from) {
  Vector v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}
template <class Vector>
[[gnu::always_inline]] inline void store_vector(void* to, Vector v) {
  __builtin_memcpy(to, &v, sizeof v);
}

// x rounded to `dtype` and back; no infinity or NaN comes in. Not a template of the type: it is a
// small part of a column's work, and the rest would be compiled three times.
template <class N>
[[gnu::always_inline]] inline typename N::Float through(DType dtype, typename N::Float x) {
  using Float = typename N::Float;
  using Word = typename N::Word;
  const Word u = (Word)x;
  if (dtype == DType::kBFloat16) {
    return (Float)((u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u);
  } else if (dtype == DType::kFloat16) {
    const Word a = u & 0x7fffffffu;
    const Word normal = (a + 0xfff + ((a >> 13) & 1)) & ~0x1fffu;
    // Adding 0.5 aligns the last bit of the sum with 2^-24.
    const Word small = (Word)(((Float)a + 0.5f) - 0.5f);
    return (Float)((u & 0x80000000u) | (a < 0x38800000u ? small : normal));
  } else {
    return x;
  }
}

// Whether codes are integers, which have zero points.
template <class F>
inline constexpr bool kIntegers = F::kShape == BlockShape::kGroup && !requires {
  typename F::Element;
};

// The nearest value to each v, and its code. Integers are signed, and v less `zero` is the value.
template <class F, class N>
[[gnu::always_inline]] inline typename N::Float nearest(typename N::Float v, typename N::Float zero,
                                                        typename N::Word& code) {
  using Float = typename N::Float;
  using Word = typename N::Word;
  if constexpr (kIntegers<F>) {
    constexpr float kAligned = 0x1.8p23f;  // integers are the last bits of a sum with it
    Float number = v + zero;
    number = number < F::kLowest ? Float{} + F::kLowest : number;
    number = number > F::kHighest ? Float{} + F::kHighest : number;
    const Float sum = number + kAligned;
    code = (Word)sum - std::bit_cast<std::uint32_t>(kAligned);
    return (sum - kAligned) - zero;
  } else if constexpr (F::kPerByte == 2) {
    constexpr const AscendingValues<F>& table = kAscending<F>;
    Float value = Float{} + table.values[0];
    code = Word{} + table.codes[0];
    unrolled<15>([&](auto i) __attribute__((always_inline)) {
      const auto above = v > table.bounds[i];
      value = above ? Float{} + table.values[i + 1] : value;
      code = above ? Word{} + table.codes[i + 1] : code;
    });
    return value;
  } else {
    // Both ways of rounding are computed, the fitting one is taken.
    constexpr std::uint32_t kLargest = std::bit_cast<std::uint32_t>(448.0f);
    constexpr std::uint32_t kNormal = std::bit_cast<std::uint32_t>(E4m3::kSmallestNormal);
    const Word u = (Word)v, all = u & 0x7fffffffu;
    const Word a = all < kLargest ? all : Word{} + kLargest;
    const Float sum = (Float)a + E4m3::kAligned;
    const Word small = (Word)(sum - E4m3::kAligned);
    const Word small_code = (Word)sum - std::bit_cast<std::uint32_t>(E4m3::kAligned);
    const Word large = (a + 0x7ffff + ((a >> 20) & 1)) & ~0xfffffu;
    const Word large_code = (large >> 20) - (120u << 3);
    const auto normal = a >= kNormal;
    code = (normal ? large_code : small_code) | (u >> 31 << 7);
    return (Float)((normal ? large : small) | (u & 0x80000000u));
  }
}

// The errors of a column into the sums, and from these the corrections of the next one.
template <class N>
[[gnu::always_inline]] inline void feed_back(const double* g, const double* c,
                                             std::size_t directions,
                                             const typename N::Double* error, double* sums,
                                             typename N::Double* correction) {
  using Double = typename N::Double;
  constexpr std::size_t kLanes = kFeedbackLanes, kWide = N::kDoubles, kDoubles = kLanes / kWide;
  Double even[kDoubles] = {}, odd[kDoubles] = {};
  for (std::size_t d = 0; d < directions; d += 2, sums += 2 * kLanes) {
    const double g0 = g[d], g1 = g[d + 1], c0 = c[d], c1 = c[d + 1];
    unrolled<kDoubles>([&](auto j) __attribute__((always_inline)) {
      double *first = sums + j * kWide, *second = first + kLanes;
      const Double sum0 = load_vector<Double>(first) + error[j] * g0;
      const Double sum1 = load_vector<Double>(second) + error[j] * g1;
      store_vector(first, sum0);
      store_vector(second, sum1);
      even[j] += sum0 * c0;
      odd[j] += sum1 * c1;
    });
  }
  unrolled<kDoubles>([&](auto j)
                         __attribute__((always_inline)) { correction[j] = even[j] + odd[j]; });
}

template <class V>
void feedback_step(const FeedbackStep& step) {
  using N = VectorsOf<V>;
  using Double = typename N::Double;
  constexpr std::size_t kWide = N::kDoubles, kDoubles = kFeedbackLanes / kWide;
  Double error[kDoubles], correction[kDoubles];
  unrolled<kDoubles>([&](auto j) __attribute__((always_inline)) {
    error[j] = load_vector<Double>(step.errors + j * kWide);
  });
  feed_back<N>(step.g, step.c, step.directions, error, step.sums, correction);
  unrolled<kDoubles>([&](auto j) __attribute__((always_inline)) {
    store_vector(step.corrections + j * kWide, correction[j]);
  });
}

// Columns that are transposed at once.
inline constexpr std::size_t kFeedbackTile = 64;

template <class F, class V>
void feedback_group(const FeedbackJob& job, std::size_t rows) {
  using N = VectorsOf<V>;
  using Double = typename N::Double;
  using Float = typename N::Float;
  using Half = typename N::Half;
  constexpr std::size_t kLanes = kFeedbackLanes, kWide = N::kDoubles, kDoubles = kLanes / kWide;
  alignas(64) double w[kFeedbackTile][kLanes];
  alignas(64) float scale[kFeedbackTile][kLanes], divisor[kFeedbackTile][kLanes];
  alignas(64) float zero[kFeedbackTile][kLanes];  // of integers alone
  alignas(64) std::uint8_t codes[kFeedbackTile][kLanes];
  Double correction[kDoubles] = {};
  const std::size_t cols = job.cols, directions = job.directions;
  const DType dtype = job.dtype;
  for (std::size_t i = 0; i < directions * kLanes; ++i) job.sums[i] = 0.0;
  for (std::size_t begin = 0; begin < cols; begin += kFeedbackTile) {
    const std::size_t width = cols - begin < kFeedbackTile ? cols - begin : kFeedbackTile;
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      // Lanes without a row repeat the first.
      const std::size_t at = (lane < rows ? lane : 0) * cols + begin;
      for (std::size_t i = 0; i < width; ++i) {
        const float s = job.scales[at + i];
        w[i][lane] = job.input[at + i];
        scale[i][lane] = s;
        divisor[i][lane] = s == 0.0f ? __builtin_inff() : s;
        if constexpr (kIntegers<F>) zero[i][lane] = job.zeros[at + i];
      }
    }
    for (std::size_t i = 0; i < width; ++i) {
      alignas(64) float narrow[kLanes];
      alignas(64) std::uint32_t code[kLanes];
      unrolled<kDoubles>([&](auto j) __attribute__((always_inline)) {
        const Double target = load_vector<Double>(&w[i][j * kWide]) - correction[j];
        store_vector(narrow + j * kWide, __builtin_convertvector(target, Half));
      });
      unrolled<kLanes / N::kFloats>([&](auto j) __attribute__((always_inline)) {
        constexpr std::size_t at = j * N::kFloats;
        const Float v = load_vector<Float>(narrow + at) / load_vector<Float>(&divisor[i][at]);
        typename N::Word chosen;
        Float middle = {};
        if constexpr (kIntegers<F>) middle = load_vector<Float>(&zero[i][at]);
        const Float value = nearest<F, N>(v, middle, chosen);
        store_vector(narrow + at, through<N>(dtype, value * load_vector<Float>(&scale[i][at])));
        store_vector(code + at, chosen);
      });
      for (std::size_t lane = 0; lane < kLanes; ++lane)
        codes[i][lane] = static_cast<std::uint8_t>(code[lane]);
      Double error[kDoubles];
      unrolled<kDoubles>([&](auto j) __attribute__((always_inline)) {
        const Half stored = load_vector<Half>(narrow + j * kWide);
        error[j] = __builtin_convertvector(stored, Double) - load_vector<Double>(&w[i][j * kWide]);
      });
      feed_back<N>(job.g + (begin + i) * directions, job.c + (begin + i + 1) * directions,
                   directions, error, job.sums, correction);
    }
    for (std::size_t lane = 0; lane < rows; ++lane) {
      std::uint8_t* out = job.codes + lane * cols + begin;
      for (std::size_t i = 0; i < width; ++i) out[i] = codes[i][lane];
    }
  }
}

template <class V, class... Fs>
[[gnu::always_inline]] inline FeedbackFn* find_feedback(FormatList<Fs...>, Format format) {
  FeedbackFn* run = nullptr;
  ((format == Fs::kFormat ? void(run = feedback_group<Fs, V>) : void()), ...);
  return run;
}

template <class V>
FeedbackFn* feedback_variant(Format format) {
  FeedbackFn* run = find_feedback<V>(PackedFormats{}, format);
  return run != nullptr ? run : find_feedback<V>(RowFormats{}, format);
}

}  // namespace monograph
