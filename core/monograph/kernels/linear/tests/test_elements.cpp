// The product on formats with small floating-point elements; test.cpp covers the rest of the
// contract, which does not know the format.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/formats/tests/reference_weight.h"
#include "monograph/kernels/linear/linear.h"
#include "monograph/kernels/linear/tests/product.h"
#include "monograph/kernels/linear/tests/random_elements.h"

namespace monograph {
namespace {

using Bytes = std::vector<std::uint8_t>;

double load(DType dtype, const Bytes& from, std::size_t i) {
  return with_type(dtype, [&]<class T>() {
    T element;
    std::memcpy(&element, from.data() + i * sizeof(T), sizeof(T));
    return static_cast<double>(to_float(element));
  });
}

template <class Body>
void for_each_variant(Pass pass, Body body) {
  for (const LinearVariant& variant : linear_variants()) {
    if (variant.pass != pass) continue;
    if (variant.isa > best_isa()) continue;
    SCOPED_TRACE(std::string(name_of(variant.isa)) + " " + name_of(variant.dtype));
    body(*variant.run, variant.dtype);
  }
}

void expect_close(DType dtype, Pass pass, const Bytes& left, std::size_t m,
                  const ReferenceWeight& w, const Bytes& got) {
  const std::size_t in = pass == Pass::kForward ? w.view.cols : w.view.rows;
  const std::size_t out = pass == Pass::kForward ? w.view.rows : w.view.cols;
  std::vector<double> rounded;
  for (const float e : w.elements)
    rounded.push_back(
        with_type(dtype, [&]<class T>() { return double(to_float(from_float<T>(e))); }));
  const double round = dtype == DType::kFloat32   ? 0x1p-24
                       : dtype == DType::kFloat16 ? 0x1p-11
                                                  : 0x1p-8;
  for (std::size_t r = 0; r < m; ++r)
    for (std::size_t p = 0; p < out; ++p) {
      double sum = 0, magnitude = 0;
      for (std::size_t i = 0; i < in; ++i) {
        const std::size_t at = pass == Pass::kForward ? p * w.view.cols + i : i * w.view.cols + p;
        const double term = load(dtype, left, r * in + i) * rounded[at];
        sum += term;
        magnitude += std::fabs(term);
      }
      const double sums = 0x1p-24 * (4 + std::sqrt(static_cast<double>(in))) * magnitude;
      const double tiny = dtype == DType::kFloat16 ? 0x1p-24 : 0x1p-126;
      ASSERT_NEAR(load(dtype, got, r * out + p), sum, 1.01 * (round * std::fabs(sum) + sums) + tiny)
          << "row " << r << " column " << p;
    }
}

struct Sizes {
  std::size_t m, n, k;
};

// m, n, k: units of two groups, of one, an odd number of rows, and no whole group at all.
constexpr std::size_t kShapes[][3] = {
    {1, 130, 128}, {17, 64, 576}, {33, 131, 160}, {5, 19, 96}, {40, 140, 64}};

TEST(LinearElements, EveryVariantIsCloseToTheExactProduct) {
  for (const auto& [info, kind] : element_formats())
    for (const Pass pass : {Pass::kForward, Pass::kDx})
      for (const auto& [m, n, k] : kShapes) {
        SCOPED_TRACE(std::string(info.name) + " " + name_of(kind) + " " + std::to_string(n) + "x" +
                     std::to_string(k));
        const ReferenceWeight w = random_reference(info, kind, 1, n, k, 1);
        for_each_variant(pass, [&, m = m, n = n, k = k](const LinearKernels& kernels, DType dtype) {
          const Bytes left = random_elements(dtype, m * (pass == Pass::kForward ? k : n), 2);
          expect_close(dtype, pass, left, m, w, product(kernels, dtype, pass, left, m, {w.view}));
        });
      }
}

TEST(LinearElements, SquareBlocksOfAnyShape) {
  const FormatInfo& info = *find_format(Format::kFp8Block);
  constexpr std::size_t kOdd[][2] = {{129, 257}, {192, 200}, {3, 1000}, {300, 7}};
  for (const Pass pass : {Pass::kForward, Pass::kDx})
    for (const auto& [n, k] : kOdd) {
      const ReferenceWeight w = random_reference(info, ScaleKind::kFp32, 1, n, k, 5);
      for_each_variant(pass, [&, n = n, k = k](const LinearKernels& kernels, DType dtype) {
        const Bytes left = random_elements(dtype, 3 * (pass == Pass::kForward ? k : n), 2);
        expect_close(dtype, pass, left, 3, w, product(kernels, dtype, pass, left, 3, {w.view}));
      });
    }
}

// With one element of the left operand 1 and the rest 0, the product is the weight itself: every
// code under every scale byte, compared to the bit.
TEST(LinearElements, AllCodesTimesAllScaleBytesComeOutExactly) {
  for (const FormatInfo& info : formats()) {
    if (info.shape != BlockShape::kRow) continue;
    SCOPED_TRACE(info.name);
    ReferenceWeight w = random_reference(info, info.kinds[0], 1, 256, 512, 1);
    for (std::size_t i = 0; i < w.values.size(); ++i)
      w.values[i] = static_cast<std::uint8_t>(i % (w.values.size() / 256));
    for (std::size_t i = 0; i < w.scales.size(); ++i)
      w.scales[i] = static_cast<std::uint8_t>(i / (w.scales.size() / 256));
    w.compute_elements(info);
    // A row with a NaN or an infinity would spoil its neighbours' zeros: 0 * NaN.
    for_each_variant(Pass::kForward, [&](const LinearKernels& kernels, DType dtype) {
      Bytes x(512 * 512 * size_bytes(dtype));
      for (std::size_t i = 0; i < 512; ++i)
        with_type(dtype, [&]<class T>() {
          const T one = from_float<T>(1.0f);
          std::memcpy(x.data() + (i * 512 + i) * sizeof(T), &one, sizeof(T));
        });
      const Bytes y = product(kernels, dtype, Pass::kForward, x, 512, {w.view});
      // Few rows may take another path.
      for (std::size_t first = 0; kernels.few != nullptr && first < 512; first += 16) {
        const auto* const from = x.data() + first * 512 * size_bytes(dtype);
        const Bytes part(from, from + 16 * 512 * size_bytes(dtype));
        const Bytes few = product(kernels, dtype, Pass::kForward, part, 16, {w.view});
        ASSERT_EQ(std::memcmp(few.data(), y.data() + first * 256 * size_bytes(dtype), few.size()),
                  0)
            << "rows from " << first;
      }
      for (std::size_t n = 0; n < 256; ++n) {
        bool finite = true;
        std::vector<double> want(512);
        for (std::size_t k = 0; k < 512; ++k) {
          want[k] = with_type(dtype, [&]<class T>() {
            return double(to_float(from_float<T>(w.elements[n * 512 + k])));
          });
          finite = finite && std::isfinite(want[k]);
        }
        for (std::size_t k = 0; k < 512; ++k) {
          const double got = load(dtype, y, k * 256 + n);
          if (!finite) {
            ASSERT_FALSE(std::isfinite(got)) << n << "," << k;
          } else if (dtype == DType::kBFloat16 && std::fabs(want[k]) < 0x1p-126) {
            ASSERT_TRUE(got == 0 || got == want[k]) << n << "," << k;  // tiles flush subnormals
          } else {
            ASSERT_EQ(got, want[k]) << n << "," << k;
          }
        }
      }
    });
  }
}

TEST(LinearElements, ARowHasTheSameBitsInEveryBatch) {
  for (const auto& [info, kind] : element_formats())
    for (const Pass pass : {Pass::kForward, Pass::kDx}) {
      // The second is longer than any chunk, and neither its rows nor its columns are whole pieces.
      for (const auto& [rows, n, k] : {Sizes{300, 192, 320}, Sizes{20, 150, 2368}}) {
        const ReferenceWeight w = random_reference(info, kind, 1, n, k, 7);
        for_each_variant(pass, [&, name = info.name, rows = rows, n = n, k = k](
                                   const LinearKernels& kernels, DType dtype) {
          const std::size_t in = pass == Pass::kForward ? k : n, out = n + k - in;
          const Bytes left = random_elements(dtype, rows * in, 2);
          const Bytes all = product(kernels, dtype, pass, left, rows, {w.view});
          for (const std::size_t m : {1u, 16u, 33u}) {
            if (m > rows) break;
            const Bytes some = product(kernels, dtype, pass, left, m, {w.view});
            ASSERT_EQ(std::memcmp(some.data(), all.data(), m * out * size_bytes(dtype)), 0)
                << name << " " << m << " rows, " << n << "x" << k;
          }
        });
      }
    }
}

}  // namespace
}  // namespace monograph
