// Walks the variant list against a naive reference; every variant must give the same bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/formats/dynamic_map.h"
#include "monograph/kernels/dequantize/dequantize.h"

namespace monograph {
namespace {

// The formats of this file; those with small floating-point elements have test_elements.cpp.
std::vector<FormatInfo> absmax_formats() {
  std::vector<FormatInfo> found;
  for (const FormatInfo& info : formats())
    if (info.shape == BlockShape::kFlat) found.push_back(info);
  return found;
}

constexpr double kNf4[16] = {-1.0,
                             -0.6961928009986877,
                             -0.5250730514526367,
                             -0.39491748809814453,
                             -0.28444138169288635,
                             -0.18477343022823334,
                             -0.09105003625154495,
                             0.0,
                             0.07958029955625534,
                             0.16093020141124725,
                             0.24611230194568634,
                             0.33791524171829224,
                             0.44070982933044434,
                             0.5626170039176941,
                             0.7229568362236023,
                             1.0};
constexpr double kFp4Twelfths[16] = {0, .0625,  8,  12,  4,  6,  2,  3,
                                     0, -.0625, -8, -12, -4, -6, -2, -3};

float code_value(Format format, unsigned code) {
  return static_cast<float>(format == Format::kNf4 ? kNf4[code] : kFp4Twelfths[code] / 12);
}

struct Weight {
  std::vector<std::uint8_t> values, scales, groups, map;
  float offset = 0;
  PackedView view;
};

Weight random_weight(Format format, std::size_t rows, std::size_t cols, std::size_t block,
                     bool nested, unsigned seed) {
  std::mt19937 random(seed);
  Weight w;
  const std::size_t n = rows * cols, blocks = ceil_div(n, block);
  w.values.resize(ceil_div(n, 2));
  for (auto& v : w.values) v = static_cast<std::uint8_t>(random());
  const auto append = [&](std::vector<std::uint8_t>& to, float x) {
    const auto bytes = std::bit_cast<std::array<std::uint8_t, 4>>(x);
    to.insert(to.end(), bytes.begin(), bytes.end());
  };
  std::lognormal_distribution<float> scale(0.0f, 8.0f);
  if (nested) {
    for (std::size_t i = 0; i < blocks; ++i)
      w.scales.push_back(static_cast<std::uint8_t>(random()));
    for (std::size_t i = 0; i < ceil_div(blocks, 256); ++i) append(w.groups, scale(random));
    for (const float x : kDynamicMap) append(w.map, x);
    w.offset = scale(random);
  } else {
    for (std::size_t i = 0; i < blocks; ++i) append(w.scales, scale(random));
  }
  w.view = {format,
            rows,
            cols,
            block,
            w.values.data(),
            {w.scales.data(), nested ? w.groups.data() : nullptr, nested ? w.map.data() : nullptr,
             w.offset}};
  return w;
}

float reference_scale(const Weight& w, std::size_t i) {
  float plain;
  if (w.groups.empty()) {
    std::memcpy(&plain, &w.scales[4 * i], 4);
    return plain;
  }
  std::memcpy(&plain, &w.groups[4 * (i / 256)], 4);
  // Both products are exact in double, so each line rounds once.
  const float product = static_cast<float>(static_cast<double>(kDynamicMap[w.scales[i]]) * plain);
  return static_cast<float>(static_cast<double>(product) + w.offset);
}

template <class T>
T reference(const Weight& w, std::size_t i) {
  const unsigned code = i % 2 ? w.values[i / 2] & 15u : w.values[i / 2] >> 4;
  const double exact =
      static_cast<double>(code_value(w.view.format, code)) * reference_scale(w, i / w.view.block);
  return from_float<T>(static_cast<float>(exact));
}

// Every variant this machine can run, over the columns [begin, end) of the flattened weight,
// written `shift` elements off the buffer's alignment.
template <class T>
void check(const Weight& w, std::size_t begin, std::size_t end, std::size_t shift = 0) {
  const std::size_t misalign = shift * sizeof(T);
  PackedView flat = w.view;
  flat.cols *= flat.rows;
  flat.rows = 1;
  std::vector<T> want;
  for (std::size_t i = begin; i < end; ++i) want.push_back(reference<T>(w, i));
  const std::size_t bytes = want.size() * sizeof(T);
  for (const auto& v : dequantize_variants()) {
    if (v.format != w.view.format || v.isa > best_isa()) continue;
    std::vector<std::uint8_t> buffer(bytes + misalign + 1, 0xa5);
    v.run(flat, 0, begin, end, dtype_of<T>, Stores::kCached, buffer.data() + misalign);
    if (bytes != 0) {
      ASSERT_EQ(std::memcmp(buffer.data() + misalign, want.data(), bytes), 0)
          << name_of(v.isa) << " block " << w.view.block << " [" << begin << ", " << end << ")";
    }
    ASSERT_EQ(buffer.back(), 0xa5) << name_of(v.isa) << " wrote past the end";
  }
}

template <class T>
class Dequantize : public testing::Test {};
using OutputTypes = testing::Types<float, Bf16, Fp16>;
TYPED_TEST_SUITE(Dequantize, OutputTypes);

TYPED_TEST(Dequantize, EveryVariantMatchesTheReferenceForEveryBlockSize) {
  for (const FormatInfo& info : absmax_formats())
    for (std::size_t block = info.smallest_block; block <= info.largest_block; block *= 2)
      for (const bool nested : {false, true})
        check<TypeParam>(random_weight(info.format, 3, 2 * block + 48, block, nested, 1), 0,
                         3 * (2 * block + 48));
}

TYPED_TEST(Dequantize, AllCodesUnderASweepOfScales) {
  for (const FormatInfo& info : absmax_formats()) {
    Weight w = random_weight(info.format, 512, 64, 64, false, 2);
    for (std::size_t i = 0; i < w.values.size(); ++i)
      w.values[i] = static_cast<std::uint8_t>(i * 17);
    for (std::size_t i = 0; i < 512; ++i) {  // subnormal to infinite, NaN last
      float s = std::ldexp(1.0f + static_cast<float>(i) / 512, static_cast<int>(i) - 260);
      if (i == 511) s = std::numeric_limits<float>::quiet_NaN();
      std::memcpy(&w.scales[4 * i], &s, 4);
    }
    check<TypeParam>(w, 0, 512 * 64);
  }
}

TYPED_TEST(Dequantize, TailsOfEverySizeFromEveryStart) {
  for (const FormatInfo& info : absmax_formats()) {
    const Weight w = random_weight(info.format, 1, 777, 64, true, 3);
    for (std::size_t size = 0; size <= 257; ++size) check<TypeParam>(w, 0, size);
    for (std::size_t start = 0; start <= 130; ++start) check<TypeParam>(w, start, 777);
  }
}

TYPED_TEST(Dequantize, MisalignedOutput) {
  const Weight w = random_weight(Format::kNf4, 1, 512, 64, false, 4);
  for (std::size_t off = 0; off < 64; ++off) check<TypeParam>(w, 0, 500, off);
}

TYPED_TEST(Dequantize, MisalignedInput) {
  Weight w = random_weight(Format::kFp4, 1, 512, 64, true, 5);
  std::vector<std::uint8_t> values(w.values.size() + 1), scales(w.scales.size() + 1);
  std::copy(w.values.begin(), w.values.end(), values.begin() + 1);
  std::copy(w.scales.begin(), w.scales.end(), scales.begin() + 1);
  w.view.values = values.data() + 1;
  w.view.scales.blocks = scales.data() + 1;
  check<TypeParam>(w, 0, 512);
}

TYPED_TEST(Dequantize, ThreadsDoNotChangeABit) {
  const Weight w = random_weight(Format::kNf4, 311, 1001, 64, true, 6);
  const std::size_t n = w.view.elements();
  std::vector<TypeParam> one(n), other(n);
  dequantize(w.view, dtype_of<TypeParam>, one.data(), serial_for);
  for (const int threads : {2, 4}) {
    ThreadPool pool(threads);
    std::fill(other.begin(), other.end(), TypeParam{});
    dequantize(w.view, dtype_of<TypeParam>, other.data(),
               [&](std::size_t count, std::size_t grain, ParallelBody body) {
                 pool.parallel_for(count, grain, body);
               });
    EXPECT_EQ(std::memcmp(one.data(), other.data(), n * sizeof(TypeParam)), 0);
  }
}

TYPED_TEST(Dequantize, StreamingGivesTheSameBits) {
  const Weight w = random_weight(Format::kFp4, 65, 1003, 64, true, 9);
  const std::size_t n = w.view.elements();
  std::vector<TypeParam> want(n);
  dequantize(w.view, dtype_of<TypeParam>, want.data(), serial_for);
  for (const std::size_t off : {0, 1}) {  // aligned to 64 bytes, and not: then it is a mere wish
    std::vector<TypeParam> buffer(n + 64);
    auto address = (reinterpret_cast<std::uintptr_t>(buffer.data()) + 63) / 64 * 64;
    TypeParam* out = reinterpret_cast<TypeParam*>(address) + off;
    dequantize(w.view, dtype_of<TypeParam>, out, serial_for, Stores::kStreaming);
    EXPECT_EQ(std::memcmp(out, want.data(), n * sizeof(TypeParam)), 0);
  }
}

TYPED_TEST(Dequantize, RowsOfOddLengthStartInsideAByte) {
  const Weight w = random_weight(Format::kNf4, 5, 33, 32, false, 8);
  std::vector<TypeParam> out(33);
  for (std::size_t row = 0; row < 5; ++row) {
    for (const auto& v : dequantize_variants()) {
      if (v.format != w.view.format || v.isa > best_isa()) continue;
      v.run(w.view, row, 0, 33, dtype_of<TypeParam>, Stores::kCached, out.data());
      for (std::size_t i = 0; i < 33; ++i) {
        const TypeParam want = reference<TypeParam>(w, row * 33 + i);
        ASSERT_EQ(std::memcmp(&out[i], &want, sizeof want), 0) << row << "," << i;
      }
    }
  }
}

}  // namespace
}  // namespace monograph
