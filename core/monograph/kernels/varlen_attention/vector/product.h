// The one matrix product of the vector variants, on packed fp32 blocks.
#pragma once

#include "monograph/simd/lanes.h"
#include "monograph/simd/unrolled.h"

namespace monograph {

// Element (m, k) of the left operand is data[m * row + k * column]: either way round.
struct Left {
  const float* data;
  std::int64_t row, column;
};

// What product() computes at a time: kRows rows of kVectors vectors, in registers.
template <class V>
struct ProductBlock {
  static constexpr std::int64_t kRows = 6, kVectors = 2;
};
template <>
struct ProductBlock<simd::Scalar> {
  static constexpr std::int64_t kRows = 4, kVectors = 2;
};
template <>
struct ProductBlock<simd::Avx512> {
  static constexpr std::int64_t kRows = 6, kVectors = 4;
};

// Unrolled by force: left to a compiler at -O2 the sums lay in memory, at a third of the speed.
template <class V, std::size_t kRows, std::size_t kVectors>
[[gnu::always_inline]] inline void product_block(const Left& a, const float* b, std::int64_t ldb,
                                                 float* c, std::int64_t ldc, std::int64_t depth,
                                                 bool accumulate) {
  using L = Lanes<V>;
  using F32 = typename L::F32;
  constexpr auto at = [](auto n) { return static_cast<std::int64_t>(n()) * L::kLanes; };
  F32 sum[kRows][kVectors];
  unrolled<kRows * kVectors>([&](auto i) __attribute__((always_inline)) {
    sum[i / kVectors][i % kVectors] = L::set(0.f);
  });
  const float* left = a.data;
  for (std::int64_t k = 0; k < depth; ++k, left += a.column, b += ldb) {
    F32 right[kVectors];
    unrolled<kVectors>([&](auto n)
                           __attribute__((always_inline)) { right[n] = L::load(b + at(n)); });
    unrolled<kRows>([&](auto m) __attribute__((always_inline)) {
      const F32 x = L::set(left[static_cast<std::int64_t>(m()) * a.row]);
      unrolled<kVectors>([&](auto n) __attribute__((always_inline)) {
        sum[m][n] = L::fma(x, right[n], sum[m][n]);
      });
    });
  }
  unrolled<kRows>([&](auto m) __attribute__((always_inline)) {
    float* const row = c + static_cast<std::int64_t>(m()) * ldc;
    unrolled<kVectors>([&](auto n) __attribute__((always_inline)) {
      L::store(row + at(n), accumulate ? L::add(L::load(row + at(n)), sum[m][n]) : sum[m][n]);
    });
  });
}

template <class V, std::int64_t kRows>
[[gnu::always_inline]] inline void product_rows(const Left& a, const float* b, std::int64_t ldb,
                                                float* c, std::int64_t ldc, std::int64_t columns,
                                                std::int64_t depth, bool accumulate) {
  using L = Lanes<V>;
  std::int64_t n = 0;
  const auto some = [&]<std::int64_t kVectors>() __attribute__((always_inline)) {
    for (; n + kVectors * L::kLanes <= columns; n += kVectors * L::kLanes)
      product_block<V, kRows, kVectors>(a, b + n, ldb, c + n, ldc, depth, accumulate);
  };
  constexpr std::int64_t kMost = ProductBlock<V>::kVectors;
  some.template operator()<kMost>();
  if constexpr (kMost > 2) some.template operator()<2>();
  some.template operator()<1>();
}

// Where the entries of some rows lie: row m's in [begin[m], end[m]); null: anywhere.
struct Within {
  const std::int64_t *begin = nullptr, *end = nullptr;

  struct Range {
    std::int64_t begin, end;
  };
  [[gnu::always_inline]] Range of(std::int64_t first, std::int64_t rows, std::int64_t all) const {
    if (begin == nullptr) return {0, all};
    Range range = {all, 0};
    for (std::int64_t m = first; m < first + rows; ++m) {
      range.begin = begin[m] < range.begin ? begin[m] : range.begin;
      range.end = end[m] > range.end ? end[m] : range.end;
    }
    return range;
  }
};

// c[rows, columns] = a[rows, depth] * b[depth, columns], of a row what is `wanted` at least; the
// rest of it is undefined. columns is a multiple of the lanes. Each element is one chain over k
// ascending, whatever the block it falls in. Aligned: two builds that placed it elsewhere within 64
// bytes ran 8 to 23 % apart on AVX2.
template <class V>
[[gnu::aligned(64)]] void product_of(Left a, const float* b, std::int64_t ldb, float* c,
                                     std::int64_t ldc, std::int64_t rows, std::int64_t columns,
                                     std::int64_t depth, Within wanted) {
  constexpr std::int64_t kLanes = Lanes<V>::kLanes;
  std::int64_t m = 0;
  const auto some = [&]<std::int64_t kRows>() __attribute__((always_inline)) {
    for (; m + kRows <= rows; m += kRows, a.data += kRows * a.row) {
      const Within::Range range = wanted.of(m, kRows, columns);
      const std::int64_t from = range.begin / kLanes * kLanes;
      const std::int64_t to = (range.end + kLanes - 1) / kLanes * kLanes;
      product_rows<V, kRows>(a, b + from, ldb, c + m * ldc + from, ldc, to - from, depth, false);
    }
  };
  some.template operator()<ProductBlock<V>::kRows>();
  some.template operator()<1>();
}

// c[rows, columns] += a[rows, depth] * b[depth, columns], where a is zero but for what is `filled`
// and b is finite. Each element is such a chain from zero, then added: one chain over the whole
// document had five times the error in dV. Columns outside: a panel of b stays in L1.
template <class V>
[[gnu::aligned(64)]] void add_product(Left a, const float* b, std::int64_t ldb, float* c,
                                      std::int64_t ldc, std::int64_t rows, std::int64_t columns,
                                      std::int64_t depth, Within filled) {
  constexpr std::int64_t kPanel = ProductBlock<V>::kVectors * Lanes<V>::kLanes;
  for (std::int64_t n = 0; n < columns; n += kPanel) {
    const std::int64_t width = columns - n < kPanel ? columns - n : kPanel;
    std::int64_t m = 0;
    const auto some = [&]<std::int64_t kRows>() __attribute__((always_inline)) {
      for (; m + kRows <= rows; m += kRows) {
        const Within::Range range = filled.of(m, kRows, depth);
        if (range.begin >= range.end) continue;
        const Left left = {a.data + m * a.row + range.begin * a.column, a.row, a.column};
        product_rows<V, kRows>(left, b + range.begin * ldb + n, ldb, c + m * ldc + n, ldc, width,
                               range.end - range.begin, true);
      }
    };
    some.template operator()<ProductBlock<V>::kRows>();
    some.template operator()<1>();
  }
}

// The same where b may hold NaN or infinities: nothing outside of `filled` is read. The same chains
// and bits, several times slower.
template <class V>
[[gnu::noinline, gnu::cold]] void product_within(Left a, const float* b, std::int64_t ldb, float* c,
                                                 std::int64_t ldc, std::int64_t rows,
                                                 std::int64_t columns, std::int64_t,
                                                 Within filled) {
  using L = Lanes<V>;
  for (std::int64_t m = 0; m < rows; ++m, a.data += a.row)
    for (std::int64_t n = 0; n < columns; n += L::kLanes) {
      typename L::F32 sum = L::set(0.f);
      for (std::int64_t k = filled.begin[m]; k < filled.end[m]; ++k)
        sum = L::fma(L::set(a.data[k * a.column]), L::load(b + k * ldb + n), sum);
      float* const at = c + m * ldc + n;
      L::store(at, L::add(L::load(at), sum));
    }
}

}  // namespace monograph
