// A slice of a packed weight multiplies as a plain copy of its rows does, to the bit: forward and
// dx, for every format, every start and every variant. Copies know no blocks, groups or origins.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/formats/slice.h"
#include "monograph/formats/tests/small_weights.h"
#include "monograph/kernels/dequantize/dequantize.h"
#include "monograph/kernels/linear/linear.h"
#include "monograph/kernels/linear/tests/product.h"
#include "monograph/kernels/linear/tests/random_elements.h"

namespace monograph {
namespace {

LinearWeight plain(const void* elements, DType dtype, std::size_t rows, std::size_t cols) {
  LinearWeight weight;
  weight.dtype = dtype;
  weight.packed.rows = rows;
  weight.packed.cols = cols;
  weight.packed.values = static_cast<const std::uint8_t*>(elements);
  return weight;
}

void check_slices(const LinearKernels& kernels, DType dtype, Pass pass, const PackedView& whole,
                  const std::vector<float>& elements) {
  const std::size_t rows = whole.rows, cols = whole.cols;
  const Bytes left = random_elements(dtype, 18 * std::max(rows, cols), 1);
  for (std::size_t first = 0; first < rows; ++first) {
    const std::size_t count =
        first % 3 == 0 ? rows - first : std::min<std::size_t>(rows - first, 9);
    const LinearWeight part = {slice_rows(whole, first, count), DType::kFloat32};
    // Few rows of the left operand take another path than many.
    const std::size_t m = first % 2 == 0 ? 1 : 18;
    const LinearWeight copy = plain(elements.data() + first * cols, DType::kFloat32, count, cols);
    ASSERT_EQ(product(kernels, dtype, pass, left, m, part),
              product(kernels, dtype, pass, left, m, copy))
        << count << " rows from " << first << " by " << m;
  }
}

TEST(LinearSlices, MultiplyAsCopiesOfTheirRows) {
  for (const SmallWeight& w : small_weights()) {
    SCOPED_TRACE(w.name);
    std::vector<float> elements(w.view.elements());
    dequantize(w.view, DType::kFloat32, elements.data(), serial_for);
    for (const LinearVariant& variant : linear_variants()) {
      if (variant.isa > best_isa() || variant.dtype == DType::kFloat16) continue;
      SCOPED_TRACE(std::string(name_of(variant.isa)) + " " + name_of(variant.dtype) +
                   (variant.pass == Pass::kForward ? " forward" : " dx"));
      check_slices(*variant.run, variant.dtype, variant.pass, w.view, elements);
    }
  }
}

TEST(LinearSlices, OfAPlainWeightAreItsRows) {
  for (const DType stored : {DType::kBFloat16, DType::kFloat32})
    for (const std::size_t cols : {33u, 128u}) {
      constexpr std::size_t kRows = 40;
      const Bytes elements = random_elements(stored, kRows * cols, 1);
      const LinearWeight whole = plain(elements.data(), stored, kRows, cols);
      for (const LinearVariant& variant : linear_variants()) {
        const auto& [dtype, pass] = static_cast<const ByPass&>(variant);
        if (variant.isa > best_isa() || dtype != DType::kBFloat16) continue;
        const Bytes left = random_elements(dtype, 18 * std::max(kRows, cols), 1);
        for (std::size_t first = 0; first < kRows; ++first) {
          const std::size_t count = kRows - first, m = first % 2 == 0 ? 1 : 18;
          const LinearWeight part = {slice_rows(whole.packed, first, count), stored};
          const LinearWeight copy =
              plain(elements.data() + first * cols * size_bytes(stored), stored, count, cols);
          ASSERT_EQ(product(*variant.run, dtype, pass, left, m, part),
                    product(*variant.run, dtype, pass, left, m, copy))
              << name_of(variant.isa) << " from " << first;
        }
      }
    }
}

}  // namespace
}  // namespace monograph
