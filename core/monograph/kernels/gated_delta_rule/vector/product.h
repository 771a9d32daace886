// The matrix product of the vector variants, on packed fp32 blocks, and the transposition that
// brings its right operand into place.
#pragma once

#include "monograph/simd/lanes.h"
#include "monograph/simd/unrolled.h"

namespace monograph {

// Element (m, k) is data[m * row + k * column]: either way round.
struct DeltaLeft {
  const float* data;
  std::int64_t row, column;
};

// What is known to be zero in a product of square blocks, or not wanted.
enum class DeltaShape : std::uint8_t {
  kFull,
  kLower,    // the left operand is zero above the diagonal
  kUpper,    // ... below the diagonal
  kResults,  // results are wanted up to the end of the 16 columns that hold the diagonal
};

// What the product computes at a time: kRows rows of kVectors vectors, in registers. kRows divides
// 16.
template <class V>
struct DeltaBlock {
  static constexpr std::int64_t kRows = 4, kVectors = 2;
};
template <>
struct DeltaBlock<simd::Avx512> {
  static constexpr std::int64_t kRows = 8, kVectors = 2;
};

template <class V>
struct DeltaProduct {
  using L = Lanes<V>;
  using F32 = typename L::F32;
  static constexpr std::int64_t kRows = DeltaBlock<V>::kRows, kVectors = DeltaBlock<V>::kVectors;

  template <std::size_t kWide>
  [[gnu::always_inline]] static void block(const DeltaLeft& a, const float* b, std::int64_t ldb,
                                           float* c, std::int64_t ldc, std::int64_t depth,
                                           float keep) {
    F32 sum[kRows][kWide];
    unrolled<kRows>([&](auto m) __attribute__((always_inline)) {
      unrolled<kWide>([&](auto n) __attribute__((always_inline)) { sum[m][n] = L::set(0.f); });
    });
    const float* left = a.data;
    for (std::int64_t k = 0; k < depth; ++k, left += a.column, b += ldb) {
      F32 right[kWide];
      unrolled<kWide>([&](auto n) __attribute__((always_inline)) {
        right[n] = L::load(b + static_cast<std::int64_t>(n()) * L::kLanes);
      });
      unrolled<kRows>([&](auto m) __attribute__((always_inline)) {
        const F32 x = L::set(left[static_cast<std::int64_t>(m()) * a.row]);
        unrolled<kWide>([&](auto n) __attribute__((always_inline)) {
          sum[m][n] = L::fma(x, right[n], sum[m][n]);
        });
      });
    }
    const F32 factor = L::set(keep);
    unrolled<kRows>([&](auto m) __attribute__((always_inline)) {
      unrolled<kWide>([&](auto n) __attribute__((always_inline)) {
        float* const at =
            c + static_cast<std::int64_t>(m()) * ldc + static_cast<std::int64_t>(n()) * L::kLanes;
        L::store(at, keep == 0 ? sum[m][n] : L::fma(L::load(at), factor, sum[m][n]));
      });
    });
  }

  // c[rows, columns] = keep * c + a[rows, depth] * b[depth, columns]; with keep = 0 c is not read.
  // Rows and columns are multiples of 16. Each element is one chain over the depth, whatever the
  // block it falls in. Columns outside: a panel of b stays in L1.
  [[gnu::noinline]] static void run(DeltaLeft a, const float* b, std::int64_t ldb, float* c,
                                    std::int64_t ldc, std::int64_t rows, std::int64_t columns,
                                    std::int64_t depth, float keep,
                                    DeltaShape shape = DeltaShape::kFull) {
    constexpr std::int64_t kPanel = kVectors * L::kLanes;
    for (std::int64_t n = 0; n < columns; n += kPanel)
      for (std::int64_t m = 0; m < rows; m += kRows) {
        if (shape == DeltaShape::kResults && n >= m / 16 * 16 + 16) continue;
        const std::int64_t begin = shape == DeltaShape::kUpper ? m : 0;
        const std::int64_t end = shape == DeltaShape::kLower ? m + kRows : depth;
        const DeltaLeft left = {a.data + m * a.row + begin * a.column, a.row, a.column};
        if (n + kPanel <= columns)
          block<kVectors>(left, b + begin * ldb + n, ldb, c + m * ldc + n, ldc, end - begin, keep);
        else
          block<1>(left, b + begin * ldb + n, ldb, c + m * ldc + n, ldc, end - begin, keep);
      }
  }
};

template <class V>
struct DeltaTranspose {
  // out[c][r] = in[r][c]; rows and columns are multiples of 16.
  [[gnu::noinline]] static void run(const float* in, std::int64_t ldi, std::int64_t rows,
                                    std::int64_t columns, float* out, std::int64_t ldo) {
    for (std::int64_t r = 0; r < rows; r += 8)
      for (std::int64_t c = 0; c < columns; ++c)
        unrolled<8>([&](auto i) __attribute__((always_inline)) {
          const std::int64_t at = r + static_cast<std::int64_t>(i());
          out[c * ldo + at] = in[at * ldi + c];
        });
  }
};

}  // namespace monograph
