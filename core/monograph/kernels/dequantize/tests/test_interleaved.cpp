// ggml's blocks: random bytes with every pattern of their fp16 numbers, any start and end, slices,
// row maps.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/formats/slice.h"
#include "monograph/formats/tests/ggml_weight.h"
#include "monograph/kernels/dequantize/dequantize.h"

namespace monograph {
namespace {

// NaN has one sign and payload.
template <class T>
bool same(float want, T got) {
  const T rounded = from_float<T>(std::isnan(want) ? std::bit_cast<float>(0x7fc00000u) : want);
  return std::memcmp(&rounded, &got, sizeof got) == 0;
}

// Columns [begin, end) of every row of a view whose first row is `first` of the weight, for every
// variant this machine runs.
template <class T>
void check(const GgmlWeight& w, const PackedView& view, std::size_t first, std::size_t begin,
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
            << w.info->name << " " << name_of(v.isa) << " row " << first + row << " column " << i
            << ": " << to_float(got[i - begin]) << ", wanted "
            << w.elements[(first + row) * w.cols + i];
    }
  }
  ASSERT_GE(variants, 1u);
}

template <class T>
class DequantizeInterleaved : public testing::Test {};
using OutputTypes = testing::Types<float, Bf16, Fp16>;
TYPED_TEST_SUITE(DequantizeInterleaved, OutputTypes);

// 8,192 blocks of 32 or 1,024 of 256: scales over all exponents of fp16, minima over others,
// infinities and NaN among them, and random bytes for the rest.
TYPED_TEST(DequantizeInterleaved, RandomBytesUnderASweepOfScales) {
  for (const FormatInfo* info : ggml_formats()) {
    const std::size_t cols = info->largest_block == 32 ? 512 : 1024;
    const std::size_t blocks = info->largest_block == 32 ? 8192 : 1024;
    GgmlWeight w =
        random_ggml(*info, blocks * info->largest_block / cols, cols, 1, GgmlScales::kAny);
    const auto [scale, minimum] = fp16_places(info->name);
    for (std::size_t b = 0; b < blocks; ++b) {
      const auto bits = static_cast<std::uint16_t>(b * (65536 / blocks) + b % 31);
      std::memcpy(w.bytes.data() + b * info->block_bytes + scale, &bits, 2);
      if (minimum < 0) continue;
      const auto other = static_cast<std::uint16_t>(b * 40503u);
      std::memcpy(w.bytes.data() + b * info->block_bytes + minimum, &other, 2);
    }
    w.bind();
    check<TypeParam>(w, w.view, 0, 0, cols);
  }
}

// Every infinity and NaN against every other, with every code.
TYPED_TEST(DequantizeInterleaved, ScalesThatAreNotFinite) {
  constexpr std::uint16_t kScales[] = {0x7c00, 0xfc00, 0x7e00, 0xfe12, 0x7c01,
                                       0x0000, 0x8000, 0x0001, 0x7bff, 0x3c00};
  for (const FormatInfo* info : ggml_formats()) {
    GgmlWeight w = random_ggml(*info, 100, 512, 2);
    const auto [scale, minimum] = fp16_places(info->name);
    for (std::size_t b = 0; b < w.bytes.size() / info->block_bytes; ++b) {
      std::uint8_t* block = w.bytes.data() + b * info->block_bytes;
      std::memcpy(block + scale, &kScales[b % 10], 2);
      if (minimum >= 0) std::memcpy(block + minimum, &kScales[b / 10 % 10], 2);
    }
    w.bind();
    check<TypeParam>(w, w.view, 0, 0, 512);
  }
}

TYPED_TEST(DequantizeInterleaved, TailsOfEverySizeFromEveryStart) {
  for (const FormatInfo* info : ggml_formats()) {
    const GgmlWeight w = random_ggml(*info, 2, 512, 3);
    for (std::size_t size = 0; size <= 300; ++size) check<TypeParam>(w, w.view, 0, 0, size);
    for (std::size_t start = 0; start <= 300; ++start) check<TypeParam>(w, w.view, 0, start, 512);
    for (std::size_t start = 0; start <= 64; ++start)
      check<TypeParam>(w, w.view, 0, start, start + 9);
  }
}

TYPED_TEST(DequantizeInterleaved, SlicesAndRowMaps) {
  for (const FormatInfo* info : ggml_formats())
    for (const bool mapped : {false, true}) {
      GgmlWeight w = random_ggml(*info, 21, 256, 4);
      if (mapped) {
        w.map.resize(21);
        std::iota(w.map.begin(), w.map.end(), 0);
        std::shuffle(w.map.begin(), w.map.end(), std::mt19937(5));
        w.bind();
      }
      check<TypeParam>(w, w.view, 0, 0, 256);
      for (std::size_t first = 0; first < 21; ++first) {
        const PackedView part = slice_rows(w.view, first, 21 - first);
        check<TypeParam>(w, part, first, 0, 256);
        check<TypeParam>(w, slice_rows(part, 20 - first, 1), 20, 0, 256);
      }
    }
}

TYPED_TEST(DequantizeInterleaved, WholeWeightsForAnyThreadsAndStores) {
  for (const FormatInfo* info : ggml_formats())
    for (const std::size_t cols : {256u, 768u}) {
      const GgmlWeight w = random_ggml(*info, 200, cols, 6);
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
            ASSERT_TRUE(same(w.elements[i], out[i])) << info->name << " " << i;
        }
    }
}

}  // namespace
}  // namespace monograph
