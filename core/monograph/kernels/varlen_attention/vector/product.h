// The one matrix product of the vector variants, on packed fp32 blocks.
#pragma once

#include "monograph/simd/lanes.h"

namespace monograph {

// Element (m, k) of the left operand is data[m * row + k * column]: either way round.
struct Left {
  const float* data;
  std::int64_t row, column;
};

// What product() computes at a time: kRows rows of kVectors vectors, in registers.
template <class V>
struct ProductBlock {
  static constexpr std::int64_t kRows = 4, kVectors = 2;
};
template <>
struct ProductBlock<simd::Avx512> {
  static constexpr std::int64_t kRows = 6, kVectors = 4;
};

template <class V, std::int64_t kRows, std::int64_t kVectors>
[[gnu::always_inline]] inline void product_block(const Left& a, const float* b, std::int64_t ldb,
                                                 float* c, std::int64_t ldc, std::int64_t depth,
                                                 bool accumulate) {
  using L = Lanes<V>;
  typename L::F32 sum[kRows][kVectors];
  for (std::int64_t m = 0; m < kRows; ++m)
    for (std::int64_t n = 0; n < kVectors; ++n) sum[m][n] = L::set(0.f);
  for (std::int64_t k = 0; k < depth; ++k) {
    typename L::F32 right[kVectors];
    for (std::int64_t n = 0; n < kVectors; ++n) right[n] = L::load(b + k * ldb + n * L::kLanes);
    for (std::int64_t m = 0; m < kRows; ++m) {
      const typename L::F32 left = L::set(a.data[m * a.row + k * a.column]);
      for (std::int64_t n = 0; n < kVectors; ++n) sum[m][n] = L::fma(left, right[n], sum[m][n]);
    }
  }
  for (std::int64_t m = 0; m < kRows; ++m)
    for (std::int64_t n = 0; n < kVectors; ++n) {
      float* const at = c + m * ldc + n * L::kLanes;
      L::store(at, accumulate ? L::add(L::load(at), sum[m][n]) : sum[m][n]);
    }
}

template <class V, std::int64_t kRows>
[[gnu::always_inline]] inline void product_rows(const Left& a, const float* b, std::int64_t ldb,
                                                float* c, std::int64_t ldc, std::int64_t columns,
                                                std::int64_t depth, bool accumulate) {
  using L = Lanes<V>;
  constexpr std::int64_t kVectors = ProductBlock<V>::kVectors;
  std::int64_t n = 0;
  for (; n + kVectors * L::kLanes <= columns; n += kVectors * L::kLanes)
    product_block<V, kRows, kVectors>(a, b + n, ldb, c + n, ldc, depth, accumulate);
  for (; n < columns; n += L::kLanes)
    product_block<V, kRows, 1>(a, b + n, ldb, c + n, ldc, depth, accumulate);
}

// c[rows, columns] {=, +=} a[rows, depth] * b[depth, columns]; columns is a multiple of the lanes.
// Each element is one chain over k ascending, whatever the block it falls in, and then added: one
// chain over the whole document had five times the error in dV. Aligned: two builds that placed
// it elsewhere within 64 bytes ran 8 to 23 % apart on AVX2.
template <class V>
[[gnu::aligned(64)]] void product(Left a, const float* b, std::int64_t ldb, float* c,
                                  std::int64_t ldc, std::int64_t rows, std::int64_t columns,
                                  std::int64_t depth, bool accumulate) {
  constexpr std::int64_t kRows = ProductBlock<V>::kRows;
  std::int64_t m = 0;
  for (; m + kRows <= rows; m += kRows, a.data += kRows * a.row)
    product_rows<V, kRows>(a, b, ldb, c + m * ldc, ldc, columns, depth, accumulate);
  for (; m < rows; ++m, a.data += a.row)
    product_rows<V, 1>(a, b, ldb, c + m * ldc, ldc, columns, depth, accumulate);
}

// c += a * b where row m of `a` holds something in [begin[m], end[m]) only: nothing outside is
// read, where product() would multiply its zeros with what may be NaN or infinite. The same chains
// and bits, several times slower.
template <class V>
[[gnu::noinline, gnu::cold]] void product_within(Left a, const float* b, std::int64_t ldb, float* c,
                                                 std::int64_t ldc, std::int64_t rows,
                                                 std::int64_t columns, const std::int64_t* begin,
                                                 const std::int64_t* end) {
  using L = Lanes<V>;
  for (std::int64_t m = 0; m < rows; ++m, a.data += a.row)
    for (std::int64_t n = 0; n < columns; n += L::kLanes) {
      typename L::F32 sum = L::set(0.f);
      for (std::int64_t k = begin[m]; k < end[m]; ++k)
        sum = L::fma(L::set(a.data[k * a.column]), L::load(b + k * ldb + n), sum);
      float* const at = c + m * ldc + n;
      L::store(at, L::add(L::load(at), sum));
    }
}

}  // namespace monograph
