// Walks the variant list against a naive reference; every variant must give the same bits.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/kernels/dequantize/dequantize.h"
#include "monograph/kernels/quantize/quantize.h"

namespace monograph {
namespace {

// The formats of this file; those with small floating-point elements have test_elements.cpp.
std::vector<FormatInfo> absmax_formats() {
  std::vector<FormatInfo> found;
  for (const FormatInfo& info : formats())
    if (info.shape == BlockShape::kFlat) found.push_back(info);
  return found;
}

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// The value of a code, taken from the decoder, which has a test of its own.
std::vector<float> code_values(Format format) {
  const std::uint8_t values[16] = {0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77,
                                   0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff};
  const float one = 1.0f;
  const PackedView view = {format, 1,      32,
                           32,     values, {reinterpret_cast<const std::uint8_t*>(&one)}};
  std::vector<float> pairs(32), out(16);
  dequantize(view, DType::kFloat32, pairs.data(), serial_for);
  for (std::size_t i = 0; i < 16; ++i) out[i] = pairs[2 * i];
  return out;
}

// The code whose value is nearest, ties to the smaller value; among equal values the lower code for
// v <= 0, the higher above (FP4 has two zeros).
unsigned nearest(const std::vector<float>& values, float v) {
  unsigned best = 0;
  for (unsigned i = 1; i < 16; ++i) {
    const double d = std::fabs(static_cast<double>(v) - values[i]);
    const double b = std::fabs(static_cast<double>(v) - values[best]);
    if (d < b || (d == b && (values[i] < values[best] || (values[i] == values[best] && v > 0))))
      best = i;
  }
  return best;
}

struct Result {
  std::vector<std::uint8_t> values;
  std::vector<float> scales;
  std::size_t bad = kAllFinite;
};

bool is_absmax(const Variant<QuantizeFn, ByFormat>& v) {
  return v.isa <= best_isa() && find_format(v.format)->shape == BlockShape::kFlat;
}

std::uint8_t* bytes_of(Result& r) { return reinterpret_cast<std::uint8_t*>(r.scales.data()); }

template <class T>
Result run(QuantizeFn* fn, Format format, const T* in, std::size_t n, std::size_t block,
           NonFinite nonfinite = NonFinite::kError) {
  Result r;
  r.values.assign(ceil_div(n, 2) + 1, 0xa5);
  r.scales.assign(ceil_div(n, block), -1.0f);
  const QuantizeJob job = {format,    dtype_of<T>,     in,         n, block,
                           nonfinite, r.values.data(), bytes_of(r)};
  r.bad = fn(job, 0, ceil_div(n, block));
  EXPECT_EQ(r.values.back(), 0xa5) << "wrote past the end";
  r.values.pop_back();
  return r;
}

template <class T>
std::vector<T> random_input(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  std::vector<T> in(n);
  for (T& x : in) x = from_float<T>(normal(random));
  return in;
}

// A block of `first, x, x, ...`: with first = 1 the scale is 1 and x is encoded as it is.
unsigned code_at(const Result& r, std::size_t i) {
  return i % 2 ? r.values[i / 2] & 15u : r.values[i / 2] >> 4;
}

template <class T>
void check_against_reference(Format format, const std::vector<T>& in, std::size_t block) {
  const auto values = code_values(format);
  for (const auto& v : quantize_variants()) {
    if (v.format != format || v.isa > best_isa()) continue;
    const Result r = run(v.run, format, in.data(), in.size(), block);
    for (std::size_t i = 0; i < in.size(); ++i) {
      const std::size_t begin = i / block * block, end = std::min(begin + block, in.size());
      float absmax = 0;
      for (std::size_t j = begin; j < end; ++j)
        absmax = std::max(absmax, std::fabs(to_float(in[j])));
      const bool partial = end - begin < block;
      const float divisor = std::max(absmax, 1e-38f);
      ASSERT_EQ(r.scales[i / block], partial ? divisor : absmax);
      const float scaled = partial ? to_float(in[i]) / divisor : to_float(in[i]) * (1.0f / divisor);
      // A midpoint rounded to fp32 may lie a fraction of an ulp off: leave that hair to the test
      // below.
      const unsigned want = nearest(values, scaled), got = code_at(r, i);
      if (want != got) {
        const double middle = (static_cast<double>(values[want]) + values[got]) / 2;
        ASSERT_NEAR(scaled, middle, 6e-8) << name_of(v.isa) << " element " << i;
      }
    }
  }
}

template <class T>
class Quantize : public testing::Test {};
using InputTypes = testing::Types<float, Bf16, Fp16>;
TYPED_TEST_SUITE(Quantize, InputTypes);

TYPED_TEST(Quantize, EveryVariantTakesTheNearestCode) {
  for (const FormatInfo& info : absmax_formats())
    for (std::size_t block = info.smallest_block; block <= info.largest_block; block *= 2)
      check_against_reference(info.format, random_input<TypeParam>(2 * block + 77, 1), block);
}

TYPED_TEST(Quantize, TailsOfEverySize) {
  for (const FormatInfo& info : absmax_formats())
    for (std::size_t n = 0; n <= 257; ++n)
      check_against_reference(info.format, random_input<TypeParam>(n, 2), 64);
}

TYPED_TEST(Quantize, VariantsAgreeToTheBit) {
  const auto in = random_input<TypeParam>(1 << 16, 3);
  for (const FormatInfo& info : absmax_formats()) {
    Result first;
    for (const auto& v : quantize_variants()) {
      if (v.format != info.format || v.isa > best_isa()) continue;
      // One element off: no alignment is assumed.
      const Result r = run(v.run, info.format, in.data() + 1, in.size() - 1, 64);
      if (first.values.empty()) first = r;
      EXPECT_EQ(r.values, first.values) << name_of(v.isa);
      EXPECT_EQ(r.scales, first.scales) << name_of(v.isa);
    }
  }
}

TEST(Quantize16, AllBf16Values) {
  for (const FormatInfo& info : absmax_formats()) {
    // 32 values of one sign and neighbouring magnitude a block, every finite bf16 once.
    std::vector<Bf16> in;
    for (std::uint32_t u = 0; u < 0x10000; ++u)
      if ((u & 0x7fff) < 0x7f80) in.push_back({static_cast<std::uint16_t>(u)});
    check_against_reference(info.format, in, 32);
  }
}

TEST(QuantizeTies, EveryMidpointAndItsNeighbours) {
  for (const FormatInfo& info : absmax_formats()) {
    const auto values = code_values(info.format);
    std::vector<float> sorted = values;
    std::sort(sorted.begin(), sorted.end());
    for (int i = 0; i < 15; ++i) {
      const float middle = (sorted[i] + sorted[i + 1]) / 2;  // rounded to fp32: the bound itself
      std::vector<float> in(32, middle);
      in[0] = 1.0f;
      in[2] = std::nextafter(middle, -2.0f);
      in[3] = std::nextafter(middle, 2.0f);
      for (const auto& v : quantize_variants()) {
        if (v.format != info.format || v.isa > best_isa()) continue;
        const Result r = run(v.run, info.format, in.data(), 32, 32);
        EXPECT_EQ(values[code_at(r, 1)], sorted[i]) << "a tie goes down";
        EXPECT_EQ(values[code_at(r, 2)], sorted[i]);
        EXPECT_EQ(values[code_at(r, 3)], sorted[i + 1]);
      }
    }
  }
}

TEST(QuantizeNonFinite, TheErrorNamesTheFirstPosition) {
  for (const float bad : {kNaN, kInf, -kInf}) {
    auto in = random_input<float>(1000, 4);
    in[700] = bad;
    in[333] = bad;
    for (const auto& v : quantize_variants())
      if (is_absmax(v)) EXPECT_EQ(run(v.run, v.format, in.data(), 1000, 64).bad, 333u);
    ThreadPool pool(3);
    Result r;
    r.values.resize(500);
    r.scales.resize(16);
    const QuantizeJob job = {Format::kNf4, DType::kFloat32,   in.data(),       1000,
                             64,           NonFinite::kError, r.values.data(), bytes_of(r)};
    const auto first = quantize(job, [&](std::size_t count, std::size_t, ParallelBody body) {
      pool.parallel_for(count, 1, body);
    });
    EXPECT_EQ(first, 333u);
  }
}

TEST(QuantizeNonFinite, SaturateLeavesThemOutOfTheScale) {
  std::vector<float> in(64, 0.25f);
  in[0] = kNaN;
  in[1] = kInf;
  in[2] = -kInf;
  in[3] = -0.5f;
  for (const auto& v : quantize_variants()) {
    if (!is_absmax(v)) continue;
    const Result r = run(v.run, v.format, in.data(), 64, 64, NonFinite::kSaturate);
    const auto values = code_values(v.format);
    EXPECT_EQ(r.bad, kAllFinite);
    EXPECT_EQ(r.scales[0], 0.5f);
    EXPECT_EQ(values[code_at(r, 0)], 0.0f);
    EXPECT_EQ(values[code_at(r, 1)], 1.0f);
    EXPECT_EQ(values[code_at(r, 2)], -1.0f);
    EXPECT_EQ(values[code_at(r, 3)], -1.0f);
  }
}

TEST(QuantizeZeros, AnAllZeroBlockHasScaleZeroAndDecodesToZero) {
  const std::vector<float> in(64, 0.0f);
  for (const auto& v : quantize_variants()) {
    if (!is_absmax(v)) continue;
    const Result r = run(v.run, v.format, in.data(), 64, 64);
    EXPECT_EQ(r.scales[0], 0.0f);
    EXPECT_EQ(code_values(v.format)[code_at(r, 5)], 0.0f);
  }
}

TEST(QuantizeThreads, DoNotChangeABit) {
  const auto in = random_input<Bf16>(200001, 5);
  Result one, many;
  for (Result* r : {&one, &many}) {
    r->values.resize(ceil_div(in.size(), 2));
    r->scales.resize(ceil_div(in.size(), 64));
    ThreadPool pool(r == &one ? 1 : 4);
    const QuantizeJob job = {Format::kNf4, DType::kBFloat16,  in.data(),        in.size(),
                             64,           NonFinite::kError, r->values.data(), bytes_of(*r)};
    EXPECT_EQ(quantize(job, [&](std::size_t count, std::size_t grain,
                                ParallelBody body) { pool.parallel_for(count, grain, body); }),
              std::nullopt);
  }
  EXPECT_EQ(one.values, many.values);
  EXPECT_EQ(one.scales, many.scales);
}

}  // namespace
}  // namespace monograph
