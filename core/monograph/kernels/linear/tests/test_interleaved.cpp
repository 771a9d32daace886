// The product on ggml's blocks: the same bits as with the decoded weight, at any batch, with a row
// map and without.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/formats/slice.h"
#include "monograph/formats/tests/ggml_weight.h"
#include "monograph/kernels/linear/linear.h"
#include "monograph/kernels/linear/tests/decoded_weight.h"

namespace monograph {
namespace {

// The reference's elements of rows [first, first + count), rounded to the type.
Bytes rounded(const GgmlWeight& w, DType dtype, std::size_t first, std::size_t count) {
  const auto begin = w.elements.begin() + static_cast<long>(first * w.cols);
  return rounded_elements({begin, begin + static_cast<long>(count * w.cols)}, dtype);
}

void check_bits(const GgmlWeight& w, std::initializer_list<std::size_t> batches) {
  SCOPED_TRACE(w.info->name);
  check_product_bits(w, batches);
}

void shuffle_rows(GgmlWeight& w, unsigned seed) {
  w.map.resize(w.rows);
  std::iota(w.map.begin(), w.map.end(), 0);
  std::shuffle(w.map.begin(), w.map.end(), std::mt19937(seed));
  w.bind();
}

TEST(LinearInterleaved, TheSameBitsAsWithTheDecodedWeight) {
  for (const FormatInfo* info : ggml_formats()) {
    check_bits(random_ggml(*info, 133, 512, 1), {1, 3, 17, 50});
    check_bits(random_ggml(*info, 133, 768, 2), {1, 4, 49});
    if (info->largest_block == 32) check_bits(random_ggml(*info, 133, 480, 3), {1, 50});
  }
}

TEST(LinearInterleaved, LongerThanAnyChunk) {
  for (const FormatInfo* info : ggml_formats()) {
    check_bits(random_ggml(*info, 150, 2304, 4), {2, 9});
    check_bits(random_ggml(*info, 530, 256, 5), {1, 5, 49});
  }
}

TEST(LinearInterleaved, RowsInTheOrderOfAMap) {
  for (const FormatInfo* info : ggml_formats()) {
    GgmlWeight w = random_ggml(*info, 133, 512, 6);
    const std::vector<float> stored = w.elements;
    shuffle_rows(w, 7);
    ASSERT_NE(stored, w.elements);
    check_bits(w, {1, 3, 50});
  }
}

TEST(LinearInterleaved, RowsOfASlice) {
  for (const FormatInfo* info : ggml_formats())
    for (const bool mapped : {false, true}) {
      GgmlWeight w = random_ggml(*info, 61, 256, 8);
      if (mapped) shuffle_rows(w, 9);
      SCOPED_TRACE(info->name);
      for_each_linear_variant([&](const LinearKernels& kernels, DType dtype, Pass pass) {
        const Bytes some = rounded(w, dtype, 13, 37);
        const Bytes left = random_elements(dtype, 4 * (pass == Pass::kForward ? 256 : 37), 2);
        ASSERT_EQ(product(kernels, dtype, pass, left, 4, {slice_rows(w.view, 13, 37)}),
                  product(kernels, dtype, pass, left, 4, plain_weight(some, 37, 256, dtype)));
      });
    }
}

// Against the exact product, so that the comparisons above cannot hide a fault of both.
TEST(LinearInterleaved, CloseToTheExactProduct) {
  for (const FormatInfo* info : ggml_formats()) {
    const GgmlWeight w = random_ggml(*info, 37, 256, 10);
    SCOPED_TRACE(info->name);
    for_each_linear_variant([&](const LinearKernels& kernels, DType dtype, Pass pass) {
      const bool forward = pass == Pass::kForward;
      const std::size_t in = forward ? w.cols : w.rows, out = forward ? w.rows : w.cols, m = 3;
      const Bytes left = random_elements(dtype, m * in, 2);
      const Bytes got = product(kernels, dtype, pass, left, m, {w.view});
      with_type(dtype, [&]<class T>() {
        const auto at = [](const Bytes& from, std::size_t i) {
          T element;
          std::memcpy(&element, from.data() + i * sizeof(T), sizeof(T));
          return double(to_float(element));
        };
        const double unit = dtype == DType::kFloat32   ? 1e-6
                            : dtype == DType::kFloat16 ? 2e-3
                                                       : 1e-2;
        for (std::size_t i = 0; i < m * out; ++i) {
          double want = 0, size = 0;
          for (std::size_t j = 0; j < in; ++j) {
            const std::size_t row = forward ? i % out : j, col = forward ? j : i % out;
            const double term = at(left, i / out * in + j) * w.elements[row * w.cols + col];
            want += term;
            size += std::fabs(term);
          }
          ASSERT_LE(std::fabs(at(got, i) - want), unit * size) << i;
        }
      });
    });
  }
}

}  // namespace
}  // namespace monograph
