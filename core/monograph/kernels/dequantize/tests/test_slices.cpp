// Any slice of any weight is its rows, to the bit; weights whose parts were quantised one by one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/formats/slice.h"
#include "monograph/formats/tests/small_weights.h"
#include "monograph/kernels/dequantize/dequantize.h"

namespace monograph {
namespace {

template <class T>
std::vector<T> decoded(const PackedView& weight) {
  std::vector<T> out(weight.elements());
  dequantize(weight, dtype_of<T>, out.data(), serial_for);
  return out;
}

template <class T>
bool same(const T* a, const T* b, std::size_t count) {
  return count == 0 || std::memcmp(a, b, count * sizeof(T)) == 0;
}

template <class T>
class DequantizeSlices : public testing::Test {};
using OutputTypes = testing::Types<float, Bf16>;
TYPED_TEST_SUITE(DequantizeSlices, OutputTypes);

TYPED_TEST(DequantizeSlices, AreTheRowsOfTheWholeFromEveryStart) {
  for (const SmallWeight& w : small_weights()) {
    SCOPED_TRACE(w.name);
    const std::vector<TypeParam> whole = decoded<TypeParam>(w.view);
    const std::size_t rows = w.view.rows, cols = w.view.cols;
    for (std::size_t first = 0; first < rows; ++first)
      for (const std::size_t wish : {std::size_t{1}, std::size_t{2}, std::size_t{5}, rows}) {
        const std::size_t count = std::min(wish, rows - first);
        const PackedView part = slice_rows(w.view, first, count);
        const auto got = decoded<TypeParam>(part);
        ASSERT_TRUE(same(got.data(), whole.data() + first * cols, count * cols))
            << count << " rows from " << first;
      }
  }
}

TYPED_TEST(DequantizeSlices, EveryVariantDecodesARowOfASlice) {
  for (const SmallWeight& w : small_weights()) {
    SCOPED_TRACE(w.name);
    const std::vector<TypeParam> whole = decoded<TypeParam>(w.view);
    const std::size_t cols = w.view.cols;
    for (const auto& v : dequantize_variants()) {
      if (v.format != w.view.format || v.isa > best_isa()) continue;
      for (std::size_t first = 0; first < w.view.rows; ++first) {
        const PackedView part = slice_rows(w.view, first, w.view.rows - first);
        const std::size_t row = part.rows / 2, begin = cols / 3;
        std::vector<TypeParam> got(cols - begin);
        v.run(part, row, begin, cols, dtype_of<TypeParam>, Stores::kCached, got.data());
        ASSERT_TRUE(same(got.data(), whole.data() + (first + row) * cols + begin, got.size()))
            << name_of(v.isa) << " row " << row << " from " << first;
      }
    }
  }
}

TYPED_TEST(DequantizeSlices, StoresPastTheCachesFromEveryStart) {
  for (const SmallWeight& w : small_weights()) {
    const std::vector<TypeParam> whole = decoded<TypeParam>(w.view);
    std::vector<TypeParam> buffer(w.view.elements() + 64);
    const auto address = (reinterpret_cast<std::uintptr_t>(buffer.data()) + 63) / 64 * 64;
    TypeParam* const out = reinterpret_cast<TypeParam*>(address);
    for (std::size_t first = 0; first < w.view.rows; ++first) {
      const PackedView part = slice_rows(w.view, first, w.view.rows - first);
      dequantize(part, dtype_of<TypeParam>, out, serial_for, Stores::kStreaming);
      ASSERT_TRUE(same<TypeParam>(out, whole.data() + first * w.view.cols, part.elements()))
          << w.name << " from " << first;
    }
  }
}

// Four matrices quantised one by one, their bytes laid one behind the other.
TEST(PackedGrids, KeepTheirOwnBlocksGroupsOffsetsAndTensorScales) {
  struct Case {
    const char* format;
    ScaleKind kind;
    std::size_t block;
    bool nested;
    std::size_t rows, cols;
  };
  for (const Case& c : {Case{"nf4", ScaleKind::kFp32, 64, true, 5, 21},  // half a byte is left over
                        Case{"nf4", ScaleKind::kFp32, 32, true, 60, 149},  // two groups each
                        Case{"fp4", ScaleKind::kFp32, 64, false, 3, 50},
                        Case{"mxfp4", ScaleKind::kE8m0, 32, false, 3, 96},
                        Case{"nvfp4", ScaleKind::kE4m3, 16, false, 4, 48},
                        Case{"fp8-block", ScaleKind::kBf16, 128, false, 130, 140}}) {
    SCOPED_TRACE(c.format);
    std::vector<SmallWeight> parts;
    Bytes values, offsets, tensors;
    std::vector<Bytes> scales(2);
    for (unsigned i = 0; i < 4; ++i) {
      parts.push_back(small_weight(c.format, c.kind, c.block, c.nested, {c.rows, c.cols}, i));
      SmallWeight& part = parts.back();
      values.insert(values.end(), part.values.begin(), part.values.end());
      for (std::size_t s = 0; s < std::min<std::size_t>(part.scales.size(), 2); ++s)
        scales[s].insert(scales[s].end(), part.scales[s].begin(), part.scales[s].end());
      if (c.nested) {
        part.scales[3].clear();
        append_float(part.scales[3], 0.02f + 0.01f * static_cast<float>(i));
        part.view = bound(part);
        offsets.insert(offsets.end(), part.scales[3].begin(), part.scales[3].end());
      }
    }
    PackedGrids grids;
    grids.first = parts[0].view;
    grids.first.values = values.data();
    grids.first.scales.blocks = scales[0].data();
    grids.count = 4;
    grids.value_bytes = parts[0].values.size();
    grids.block_bytes = parts[0].scales[0].size();
    if (c.nested) {
      grids.first.scales.groups = scales[1].data();
      grids.group_bytes = parts[0].scales[1].size();
      grids.offsets = offsets.data();
    } else if (parts[0].scales.size() == 2) {
      grids.first.scales.tensor = scales[1].data();
      grids.tensor_each = true;
    }
    EXPECT_EQ(grids.rows(), 4 * c.rows);
    for (std::size_t first = 0; first < grids.rows(); ++first) {
      const std::size_t row = first % c.rows, count = c.rows - row;
      const auto got = decoded<float>(slice_rows(grids, first, count));
      const auto want = decoded<float>(parts[first / c.rows].view);
      ASSERT_TRUE(same(got.data(), want.data() + row * c.cols, count * c.cols)) << "from " << first;
    }
  }
}

}  // namespace
}  // namespace monograph
