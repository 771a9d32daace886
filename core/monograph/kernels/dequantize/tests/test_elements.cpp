// Formats with small floating-point elements: every code under every scale, tails, experts.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/formats/tests/reference_weight.h"
#include "monograph/kernels/dequantize/dequantize.h"

namespace monograph {
namespace {

// Columns [begin, end) of every row, for every variant this machine runs.
template <class T>
void check(const ReferenceWeight& w, std::size_t begin, std::size_t end) {
  for (const auto& v : dequantize_variants()) {
    if (v.format != w.view.format || v.isa > best_isa()) continue;
    for (std::size_t row = 0; row < w.view.rows; ++row) {
      std::vector<T> got(end - begin + 1);
      v.run(w.view, row, begin, end, dtype_of<T>, Stores::kCached, got.data());
      for (std::size_t i = begin; i < end; ++i) {
        const T want = from_float<T>(w.elements[row * w.view.cols + i]);
        // NaN has one sign and payload here, but 0 * infinity has that of the processor.
        const bool both_nan = std::isnan(to_float(want)) && std::isnan(to_float(got[i - begin]));
        ASSERT_TRUE(both_nan || std::memcmp(&want, &got[i - begin], sizeof want) == 0)
            << name_of(v.isa) << " row " << row << " column " << i << ": "
            << to_float(got[i - begin]) << ", wanted " << to_float(want);
      }
    }
  }
}

template <class T>
class DequantizeElements : public testing::Test {};
using OutputTypes = testing::Types<float, Bf16, Fp16>;
TYPED_TEST_SUITE(DequantizeElements, OutputTypes);

// One row for each scale byte; in it every code, in every lane of a vector.
ReferenceWeight every_code_and_byte(const FormatInfo& info, float tensor) {
  const std::size_t cols = info.bits == 8 ? 256 : 64;
  ReferenceWeight w = random_reference(info, info.kinds[0], 1, 256, cols, 1);
  for (std::size_t row = 0; row < 256; ++row) {
    for (std::size_t i = 0; i < w.values.size() / 256; ++i)
      w.values[row * w.values.size() / 256 + i] =
          static_cast<std::uint8_t>(info.bits == 8 ? i : i * 17 + i / 16);
    for (std::size_t i = 0; i < w.scales.size() / 256; ++i)
      w.scales[row * w.scales.size() / 256 + i] = static_cast<std::uint8_t>(row);
  }
  if (!w.tensor.empty()) std::memcpy(w.tensor.data(), &tensor, 4);
  w.compute_elements(info);
  return w;
}

TYPED_TEST(DequantizeElements, AllCodesTimesAllScaleBytes) {
  for (const FormatInfo& info : formats()) {
    if (info.shape != BlockShape::kRow) continue;
    SCOPED_TRACE(info.name);
    for (const float tensor : {0.000372f, 0x1p-140f, 3e38f, 0.0f, INFINITY}) {
      const ReferenceWeight w = every_code_and_byte(info, tensor);
      check<TypeParam>(w, 0, w.view.cols);
      if (info.tensor_scale == TensorScale::kNone) break;
    }
  }
}

TYPED_TEST(DequantizeElements, SquareBlocksUnderASweepOfScales) {
  const FormatInfo& info = *find_format(Format::kFp8Block);
  for (const ScaleKind kind : info.kinds) {
    // A grid of 256 x 1 blocks, all 256 codes in each row's 128 columns over two rows.
    ReferenceWeight w = random_reference(info, kind, 1, 256 * 128, 128, 2);
    for (std::size_t i = 0; i < w.values.size(); ++i) w.values[i] = static_cast<std::uint8_t>(i);
    for (std::size_t i = 0; i < 256; ++i) {
      const std::uint16_t half = static_cast<std::uint16_t>(i * 257);  // all exponents, both signs
      float full = std::ldexp(1.0f + static_cast<float>(i) / 256, static_cast<int>(i) - 140);
      if (i == 255) full = NAN;
      if (kind == ScaleKind::kE8m0) w.scales[i] = static_cast<std::uint8_t>(i);
      if (kind == ScaleKind::kBf16) std::memcpy(&w.scales[2 * i], &half, 2);
      if (kind == ScaleKind::kFp32) std::memcpy(&w.scales[4 * i], &full, 4);
    }
    w.compute_elements(info);
    check<TypeParam>(w, 0, 128);
  }
}

TYPED_TEST(DequantizeElements, PartialBlocksAtTheEndsOfTheGrid) {
  const FormatInfo& info = *find_format(Format::kFp8Block);
  const std::size_t shapes[][3] = {{1, 192, 192}, {1, 576, 64},  {1, 5, 4304},
                                   {1, 1, 1},     {3, 130, 129}, {2, 64, 300}};
  for (const ScaleKind kind : info.kinds)
    for (const auto& s : shapes)
      check<TypeParam>(random_reference(info, kind, s[0], s[1], s[2], 3), 0, s[2]);
}

TYPED_TEST(DequantizeElements, TailsOfEverySizeFromEveryStart) {
  for (const auto& [info, kind] : element_formats()) {
    const ReferenceWeight w = random_reference(info, kind, 1, 2, 288, 4);
    for (std::size_t size = 0; size <= 160; ++size) check<TypeParam>(w, 0, size);
    for (std::size_t start = 0; start <= 140; ++start) check<TypeParam>(w, start, 288);
  }
}

TYPED_TEST(DequantizeElements, WholeWeightsForAnyThreadsAndStores) {
  for (const auto& [info, kind] : element_formats())
    for (const std::size_t matrices : {1u, 3u}) {
      const ReferenceWeight w = random_reference(info, kind, matrices, 200, 352, 5);
      const std::size_t n = w.view.elements();
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
          for (std::size_t i = 0; i < n; ++i) {
            const TypeParam want = from_float<TypeParam>(w.elements[i]);
            ASSERT_EQ(std::memcmp(&out[i], &want, sizeof want), 0) << info.name << " " << i;
          }
        }
    }
}

}  // namespace
}  // namespace monograph
