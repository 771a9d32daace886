// The kernels for few rows give the bits of those for many: every variant that has them, format,
// number of rows and kind of tail, slices, hostile scales and codes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/formats/slice.h"
#include "monograph/formats/tests/small_weights.h"
#include "monograph/kernels/linear/linear.h"
#include "monograph/kernels/linear/tests/product.h"
#include "monograph/kernels/linear/tests/random_elements.h"

namespace monograph {
namespace {

struct Kind {
  const char* format;
  ScaleKind scales;
  std::size_t block;
  bool nested;
};
constexpr Kind kKinds[] = {
    {"nf4", ScaleKind::kFp32, 64, true},         {"nf4", ScaleKind::kFp32, 64, false},
    {"nf4", ScaleKind::kFp32, 32, true},  // smaller than a unit
    {"fp4", ScaleKind::kFp32, 256, true},        {"mxfp4", ScaleKind::kE8m0, 32, false},
    {"mxfp8", ScaleKind::kE8m0, 32, false},      {"nvfp4", ScaleKind::kE4m3, 16, false},
    {"fp8-block", ScaleKind::kFp32, 128, false}, {"fp8-block", ScaleKind::kBf16, 128, false},
    {"fp8-block", ScaleKind::kE8m0, 128, false}};

struct Size {
  std::size_t n, k;
};
constexpr Size kSizes[] = {{7, 32}, {33, 512}, {70, 1120}, {300, 4704}};

// NaN is NaN; everything else to the bit.
bool same(DType dtype, const Bytes& a, const Bytes& b) {
  return with_type(dtype, [&]<class T>() {
    for (std::size_t i = 0; i < a.size(); i += sizeof(T)) {
      T x, y;
      std::memcpy(&x, a.data() + i, sizeof x);
      std::memcpy(&y, b.data() + i, sizeof y);
      const bool equal = std::memcmp(&x, &y, sizeof x) == 0;
      if (!equal && !(std::isnan(to_float(x)) && std::isnan(to_float(y)))) return false;
    }
    return true;
  });
}

void check(const PackedView& weight, std::initializer_list<std::size_t> batches) {
  for (const LinearVariant& variant : linear_variants()) {
    if (variant.isa > best_isa() || variant.run->few == nullptr) continue;
    SCOPED_TRACE(std::string(name_of(variant.isa)) + " " + name_of(variant.dtype) +
                 (variant.pass == Pass::kForward ? " forward" : " dx"));
    LinearKernels many = *variant.run;
    many.few = nullptr;
    const LinearWeight of = {weight, variant.dtype};
    const Bytes left = random_elements(variant.dtype, 16 * std::max(weight.rows, weight.cols), 3);
    for (const std::size_t m : batches)
      ASSERT_TRUE(same(variant.dtype, product(many, variant.dtype, variant.pass, left, m, of),
                       product(*variant.run->few, variant.dtype, variant.pass, left, m, of)))
          << m << " rows";
  }
}

TEST(LinearFew, HasTheBitsOfMany) {
  unsigned seed = 0;
  for (const Kind& kind : kKinds)
    for (const auto& [n, k] : kSizes) {
      const SmallWeight w =
          small_weight(kind.format, kind.scales, kind.block, kind.nested, {n, k}, ++seed);
      SCOPED_TRACE(w.name);
      if (n <= 33)
        check(w.view, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16});
      else
        check(w.view, {1, 5, 16});
    }
}

TEST(LinearFew, OfSlicesToo) {
  unsigned seed = 0;
  for (const Kind& kind : kKinds) {
    const SmallWeight w =
        small_weight(kind.format, kind.scales, kind.block, kind.nested, {40, 576}, ++seed);
    SCOPED_TRACE(w.name);
    for (const std::size_t first : {1u, 2u, 13u, 39u})
      check(slice_rows(w.view, first, 40 - first), {1, 7});
  }
}

// Every code, NaN and subnormal ones among them, under scales that are NaN, infinite, zero, large
// and small.
TEST(LinearFew, OfHostileBytesToo) {
  unsigned seed = 0;
  for (const Kind& kind : kKinds) {
    SmallWeight w =
        small_weight(kind.format, kind.scales, kind.block, kind.nested, {12, 1152}, ++seed);
    SCOPED_TRACE(w.name);
    for (std::size_t i = 0; i < w.values.size(); i += 1 + i % 97)
      w.values[i] = static_cast<std::uint8_t>(i % 3 == 0 ? 0x7f : i % 3 == 1 ? 0x80 : 0x03);
    Bytes& stored = w.scales[0];
    const std::size_t size =
        w.info->shape == BlockShape::kFlat && kind.nested ? 1 : size_bytes(kind.scales);
    for (std::size_t i = 0; i + size <= stored.size(); i += 5 * size) {
      constexpr std::uint8_t kTops[] = {0x7f, 0x00, 0xff, 0x01, 0x7e, 0x80};
      stored[i + size - 1] = kTops[i / size / 5 % 6];
    }
    check(w.view, {1, 3, 16});
  }
}

TEST(LinearFew, OfPlainWeightsToo) {
  for (const DType stored : {DType::kBFloat16, DType::kFloat32, DType::kFloat16})
    for (const auto& [n, k] : kSizes) {
      const Bytes elements = random_elements(stored, n * k, 1);
      for (const LinearVariant& variant : linear_variants()) {
        if (variant.isa > best_isa() || variant.run->few == nullptr) continue;
        LinearWeight weight = {{}, stored};
        weight.packed.rows = n;
        weight.packed.cols = k;
        weight.packed.values = elements.data();
        LinearKernels many = *variant.run;
        many.few = nullptr;
        const Bytes left = random_elements(variant.dtype, 16 * std::max(n, k), 3);
        for (const std::size_t m : {1u, 6u, 16u})
          ASSERT_EQ(product(many, variant.dtype, variant.pass, left, m, weight),
                    product(*variant.run->few, variant.dtype, variant.pass, left, m, weight))
              << name_of(variant.isa) << " " << m << " rows";
      }
    }
}

}  // namespace
}  // namespace monograph
