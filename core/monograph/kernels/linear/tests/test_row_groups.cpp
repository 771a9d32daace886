// The product on formats with groups of a row: the same bits as with the decoded weight, at any
// batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/formats/slice.h"
#include "monograph/formats/tests/group_weight.h"
#include "monograph/kernels/linear/linear.h"
#include "monograph/kernels/linear/tests/decoded_weight.h"

namespace monograph {
namespace {

struct Sizes {
  std::size_t n, k, block;
};

void check_bits(const GroupWeight& w, std::initializer_list<std::size_t> batches) {
  SCOPED_TRACE(w.name());
  check_product_bits(w, batches);
}

TEST(LinearGroups, TheSameBitsAsWithTheDecodedWeight) {
  for (const auto& [info, symmetric] : group_cases())
    for (const auto& [n, k, block] :
         {Sizes{133, 500, 500}, Sizes{133, 500, 20}, Sizes{67, 640, 128}, Sizes{40, 576, 64}})
      check_bits(random_groups(*info, n, k, block, symmetric, 1), {1, 3, 17, 50});
}

TEST(LinearGroups, LongerThanAnyChunk) {
  for (const auto& [info, symmetric] : group_cases()) {
    if (info->kinds[0] != ScaleKind::kBf16) continue;
    check_bits(random_groups(*info, 150, 2368, 32, symmetric, 2), {2, 9});
    check_bits(random_groups(*info, 530, 256, 256, symmetric, 3), {1, 5, 49});
  }
}

TEST(LinearGroups, MoreRowsThanAnyBlock) {
  const GroupCase first = group_cases().front();
  check_bits(random_groups(*first.info, 150, 640, 32, first.symmetric, 2), {260});
}

TEST(LinearGroups, RowsOfASlice) {
  for (const auto& [info, symmetric] : group_cases()) {
    const GroupWeight w = random_groups(*info, 61, 128, 64, symmetric, 4);
    SCOPED_TRACE(w.name());
    for_each_linear_variant([&](const LinearKernels& kernels, DType dtype, Pass pass) {
      const Bytes dense = rounded_elements(w.elements, dtype);
      const Bytes some(dense.begin() + static_cast<long>(13 * 128 * size_bytes(dtype)),
                       dense.begin() + static_cast<long>(50 * 128 * size_bytes(dtype)));
      const Bytes left = random_elements(dtype, 4 * (pass == Pass::kForward ? 128 : 37), 2);
      ASSERT_EQ(product(kernels, dtype, pass, left, 4, {slice_rows(w.view, 13, 37)}),
                product(kernels, dtype, pass, left, 4, plain_weight(some, 37, 128, dtype)));
    });
  }
}

// Against the exact product, so that the comparison above cannot hide a fault of both.
TEST(LinearGroups, CloseToTheExactProduct) {
  for (const auto& [info, symmetric] : group_cases()) {
    const GroupWeight w = random_groups(*info, 37, 300, 60, symmetric, 5);
    SCOPED_TRACE(w.name());
    for_each_linear_variant([&](const LinearKernels& kernels, DType dtype, Pass pass) {
      const bool forward = pass == Pass::kForward;
      const std::size_t in = forward ? w.cols : w.rows, out = forward ? w.rows : w.cols, m = 3;
      const Bytes left = random_elements(dtype, m * in, 2);
      const Bytes got = product(kernels, dtype, pass, left, m, {w.view});
      with_type(dtype, [&]<class T>() {
        const auto at = [](const Bytes& from, std::size_t i) {
          T element;
          std::memcpy(&element, from.data() + i * sizeof(T), sizeof(T));
          return static_cast<double>(to_float(element));
        };
        const double round = sizeof(T) == 4 ? 0x1p-24 : dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
        for (std::size_t r = 0; r < m; ++r)
          for (std::size_t p = 0; p < out; ++p) {
            double sum = 0, magnitude = 0;
            for (std::size_t i = 0; i < in; ++i) {
              const float e = w.elements[forward ? p * w.cols + i : i * w.cols + p];
              const double term = at(left, r * in + i) * double(to_float(from_float<T>(e)));
              sum += term;
              magnitude += std::fabs(term);
            }
            const double sums = 0x1p-24 * (4 + std::sqrt(static_cast<double>(in))) * magnitude;
            ASSERT_NEAR(at(got, r * out + p), sum, 1.01 * (round * std::fabs(sum) + sums) + 0x1p-24)
                << "row " << r << " column " << p;
          }
      });
    });
  }
}

}  // namespace
}  // namespace monograph
