// Formats with groups of a row: every code under a sweep of scales and zero points, groups that are
// no power of two, whole rows, padded rows, slices.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/formats/slice.h"
#include "monograph/formats/tests/group_weight.h"
#include "monograph/kernels/dequantize/dequantize.h"

namespace monograph {
namespace {

template <class T>
bool same(float want, T got) {
  const T rounded = from_float<T>(want);
  // NaN has one sign and payload here, but 0 * infinity has that of the processor.
  if (std::isnan(want) && std::isnan(to_float(got))) return true;
  return std::memcmp(&rounded, &got, sizeof got) == 0;
}

// Columns [begin, end) of every row of a view whose first row is `first` of the weight, for every
// variant this machine runs.
template <class T>
void check(const GroupWeight& w, const PackedView& view, std::size_t first, std::size_t begin,
           std::size_t end) {
  std::size_t variants = 0;
  for (const auto& v : dequantize_variants()) {
    if (v.format != view.format || v.isa > best_isa()) continue;
    ++variants;
    for (std::size_t row = 0; row < view.rows; ++row) {
      std::vector<T> got(end - begin + 1);
      v.run(view, row, begin, end, dtype_of<T>, Stores::kCached, got.data());
      for (std::size_t i = begin; i < end; ++i)
        ASSERT_TRUE(same(w.elements[(first + row) * w.cols + i], got[i - begin]))
            << w.name() << " " << name_of(v.isa) << " row " << first + row << " column " << i
            << ": " << to_float(got[i - begin]) << ", wanted "
            << w.elements[(first + row) * w.cols + i];
    }
  }
  ASSERT_GE(variants, 1u);
}

template <class T>
class DequantizeGroups : public testing::Test {};
using OutputTypes = testing::Types<float, Bf16, Fp16>;
TYPED_TEST_SUITE(DequantizeGroups, OutputTypes);

// One row for each scale; in it every code, int4's in every lane of a vector. All 65,536 patterns
// of a 16-bit scale for int4, every 31st for 256 codes; of fp32 all exponents and signs.
TYPED_TEST(DequantizeGroups, EveryCodeTimesEveryScale) {
  for (const auto& [info, symmetric] : group_cases()) {
    if (!symmetric) continue;
    GroupWeight w;
    w.info = info;
    w.cols = w.block = info->bits == 4 ? 64 : 256;
    const bool wide = info->kinds[0] == ScaleKind::kFp32;
    const std::uint32_t step = wide ? 0x7ffffu : info->bits == 4 ? 1u : 31u;
    const std::uint64_t stop = wide ? std::uint64_t{1} << 32 : 65536;
    for (std::uint64_t s = 0; s < stop; s += step)
      w.scales.push_back(static_cast<std::uint32_t>(s));
    const std::uint32_t special[] = {0x7f800000, 0xff800000, 0x7fc00000, 0xffc12345,
                                     0x00000001, 0x80000000, 0x7f7fffff};
    if (wide) w.scales.insert(w.scales.end(), std::begin(special), std::end(special));
    w.rows = w.scales.size();
    for (std::size_t row = 0; row < w.rows; ++row)
      for (std::size_t i = 0; i < w.cols; ++i)
        w.codes.push_back(static_cast<unsigned>(info->bits == 8 ? i : (i + i / 16) % 16));
    w.pack();
    check<TypeParam>(w, w.view, 0, 0, w.cols);
  }
}

// One group for each zero point, one row for each of 67 scales: 67 is no multiple of 8 or 4.
TYPED_TEST(DequantizeGroups, EveryCodeLessEveryZeroPoint) {
  for (const auto& [info, symmetric] : group_cases()) {
    if (symmetric) continue;
    const std::size_t count = info->bits == 4 ? 16 : 256;
    GroupWeight w = random_groups(*info, 67, count * count, count, false, 1);
    for (std::size_t i = 0; i < w.codes.size(); ++i) w.codes[i] = static_cast<unsigned>(i % count);
    for (std::size_t i = 0; i < w.zeros.size(); ++i) w.zeros[i] = static_cast<unsigned>(i % count);
    if (info->bits == 8) w.rows = 5;  // enough of a million elements a row
    w.codes.resize(w.rows * w.cols);
    w.zeros.resize(w.rows * w.groups());
    w.scales.resize(w.rows * w.groups());
    w.pack();
    check<TypeParam>(w, w.view, 0, 0, w.cols);
  }
}

TYPED_TEST(DequantizeGroups, GroupsOfAnySizeAndPaddedRows) {
  constexpr std::size_t kShapes[][3] = {{133, 500, 500}, {133, 500, 20}, {9, 500, 125},
                                        {133, 512, 32},  {21, 512, 64},  {17, 512, 128},
                                        {12, 1001, 7},   {3, 1, 1},      {5, 96, 48}};
  for (const auto& [info, symmetric] : group_cases())
    for (const auto& [rows, cols, block] : kShapes) {
      const GroupWeight w = random_groups(*info, rows, cols, block, symmetric, 2);
      check<TypeParam>(w, w.view, 0, 0, cols);
    }
}

TYPED_TEST(DequantizeGroups, OneScaleForAll) {
  for (const auto& [info, symmetric] : group_cases()) {
    if (!symmetric) continue;
    const GroupWeight w = random_groups(*info, 133, 500, 500, true, 3, GroupScales::kOne);
    ASSERT_TRUE(w.view.scales.one);
    check<TypeParam>(w, w.view, 0, 0, 500);
  }
}

TYPED_TEST(DequantizeGroups, TailsOfEverySizeFromEveryStart) {
  for (const auto& [info, symmetric] : group_cases()) {
    const GroupWeight w = random_groups(*info, 2, 288, 96, symmetric, 4);
    for (std::size_t size = 0; size <= 160; ++size) check<TypeParam>(w, w.view, 0, 0, size);
    for (std::size_t start = 0; start <= 140; ++start) check<TypeParam>(w, w.view, 0, start, 288);
  }
}

TYPED_TEST(DequantizeGroups, SlicesAreTheRowsOfTheWholeFromEveryStart) {
  for (const auto& [info, symmetric] : group_cases()) {
    const GroupWeight w = random_groups(*info, 21, 100, 50, symmetric, 5);
    for (std::size_t first = 0; first < 21; ++first)
      for (const std::size_t count : {std::size_t{1}, std::size_t{3}, 21 - first}) {
        if (first + count > 21) continue;
        const PackedView part = slice_rows(w.view, first, count);
        ASSERT_EQ(part.rows, count);
        check<TypeParam>(w, part, first, 0, 100);
        const PackedView again = slice_rows(part, count - 1, 1);
        check<TypeParam>(w, again, first + count - 1, 0, 100);
      }
  }
}

TYPED_TEST(DequantizeGroups, WholeWeightsForAnyThreadsAndStores) {
  constexpr std::size_t kShapes[][3] = {{200, 352, 32}, {130, 500, 500}, {90, 1024, 128}};
  for (const auto& [info, symmetric] : group_cases())
    for (const auto& [rows, cols, block] : kShapes) {
      const GroupWeight w = random_groups(*info, rows, cols, block, symmetric, 6);
      const std::size_t n = w.elements.size();
      std::vector<TypeParam> buffer(n + 64);
      const auto address = (reinterpret_cast<std::uintptr_t>(buffer.data()) + 63) / 64 * 64;
      TypeParam* out = reinterpret_cast<TypeParam*>(address);
      for (const int threads : {1, 3})
        for (const Stores stores : {Stores::kCached, Stores::kStreaming}) {
          ThreadPool pool(threads);
          std::fill(buffer.begin(), buffer.end(), TypeParam{});
          dequantize(
              w.view, dtype_of<TypeParam>, out,
              [&](std::size_t count, std::size_t grain, ParallelBody body) {
                pool.parallel_for(count, grain, body);
              },
              stores);
          for (std::size_t i = 0; i < n; ++i)
            ASSERT_TRUE(same(w.elements[i], out[i])) << w.name() << " " << i;
        }
    }
}

// The bytes of fp16 scales are those of other bf16 scales: only the format's number tells them.
TEST(DequantizeGroupScales, TypesOfScalesAreToldApart) {
  constexpr const char* kPairs[][2] = {{"int4-bf16", "int4-fp16"},
                                       {"int8-bf16", "int8-fp16"},
                                       {"int8-packed-bf16", "int8-packed-fp16"},
                                       {"fp8-row-bf16", "fp8-row-fp16"}};
  for (const auto& pair : kPairs) {
    GroupWeight w = random_groups(*find_format(pair[0]), 8, 64, 32, true, 7);
    check<float>(w, w.view, 0, 0, 64);
    const std::vector<float> before = w.elements;
    const auto bytes = w.scale_bytes;
    w.info = find_format(pair[1]);
    w.pack();
    ASSERT_EQ(bytes, w.scale_bytes);
    check<float>(w, w.view, 0, 0, 64);
    EXPECT_NE(before, w.elements) << pair[0];
  }
}

}  // namespace
}  // namespace monograph
