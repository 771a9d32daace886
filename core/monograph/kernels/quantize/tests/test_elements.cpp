// Formats with small floating-point elements: the scale rules and the rounding, against plain C++.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/formats/tests/reference_weight.h"
#include "monograph/kernels/quantize/quantize.h"

namespace monograph {
namespace {

struct Packed {
  std::vector<std::uint8_t> values, scales;
  std::size_t bad = kAllFinite;
  bool operator==(const Packed&) const = default;
};

struct Case {
  FormatInfo info;
  ScaleKind kind;
  ScaleRule rule;
};

std::vector<Case> every_case() {
  std::vector<Case> cases;
  for (const auto& [info, kind] : element_formats())
    for (const ScaleRule rule : info.rules) cases.push_back({info, kind, rule});
  return cases;
}

template <class T>
QuantizeJob job_for(const Case& c, const std::vector<T>& in, std::size_t rows, std::size_t cols,
                    const TensorScales& tensor, NonFinite nonfinite, Packed& out) {
  QuantizeJob job = {};
  job.format = c.info.kernels;
  job.dtype = dtype_of<T>;
  job.input = in.data();
  job.elements = rows * cols;
  job.block = c.info.smallest_block;
  job.nonfinite = nonfinite;
  job.rule = c.rule;
  job.kind = c.kind;
  job.shape = c.info.shape;
  job.matrix_rows = rows;
  job.cols = cols;
  out.values.assign(packed_bytes(c.info, job.elements), 0xa5);
  out.scales.assign(job.blocks() * size_bytes(c.kind), 0xa5);
  job.values = out.values.data();
  job.scales = out.scales.data();
  if (c.info.tensor_scale != TensorScale::kNone) {
    job.tensors = &tensor;
    job.blocks_per_tensor = job.blocks();
  }
  return job;
}

// Every variant must give the same bytes; the last is what the caller examines.
template <class T>
Packed run_all(const Case& c, const std::vector<T>& in, std::size_t rows, std::size_t cols,
               NonFinite nonfinite = NonFinite::kError) {
  const TensorScales tensor =
      choose_tensor_scales(c.info.kernels, c.rule, dtype_of<T>, in.data(), in.size(), serial_for);
  Packed first;
  for (const auto& v : quantize_variants()) {
    if (v.format != c.info.kernels || v.isa > best_isa()) continue;
    Packed got;
    const QuantizeJob job = job_for(c, in, rows, cols, tensor, nonfinite, got);
    got.bad = v.run(job, 0, job.blocks());
    if (first.values.empty()) first = got;
    EXPECT_TRUE(got == first) << name_of(v.isa) << " " << c.info.name << " " << name_of(c.rule);
  }
  return first;
}

// Magnitudes over the whole range of fp32 and many ties: small integers times powers of two.
template <class T>
std::vector<T> hard_input(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<T> in(n);
  for (std::size_t i = 0; i < n; ++i) {
    const int range = dtype_of<T> == DType::kFloat16 ? 22 : 60;  // fp16 ends at 65504
    const int block_exponent = static_cast<int>(i / 128 * 37 % 60) % range - range / 2;
    const float tie = std::ldexp(static_cast<float>(random() % 256), block_exponent - 5);
    const float smooth = std::ldexp(static_cast<float>(random() % 65536) / 4096, block_exponent);
    const float x = random() % 3 == 0 ? smooth : tie;
    in[i] = from_float<T>(random() % 2 == 0 ? -x : x);
    if (i / 128 % 11 == 10) in[i] = from_float<T>(0.0f);  // whole blocks of zeros
  }
  return in;
}

template <class T>
class QuantizeElements : public testing::Test {};
using InputTypes = testing::Types<float, Bf16, Fp16>;
TYPED_TEST_SUITE(QuantizeElements, InputTypes);

TYPED_TEST(QuantizeElements, VariantsAgreeToTheBitUnderEveryRule) {
  for (const Case& c : every_case()) {
    run_all(c, hard_input<TypeParam>(96 * 352, 1), 96, 352);
    run_all(c, hard_input<TypeParam>(300 * 160, 2), 300, 160);
  }
}

// What the rules promise whatever the scale: the code is the nearest to x / scale. Rules that
// multiply with a rounded reciprocal may miss a tie by an ulp.
TYPED_TEST(QuantizeElements, EveryElementGetsTheNearestCode) {
  for (const Case& c : every_case()) {
    if (c.info.tensor_scale != TensorScale::kNone) continue;  // below
    SCOPED_TRACE(std::string(c.info.name) + " " + name_of(c.rule));
    const auto in = hard_input<TypeParam>(200 * 160, 3);
    const Packed p = run_all(c, in, 200, 160);
    ReferenceWeight w = random_reference(c.info, c.kind, 1, 200, 160, 0);
    w.values = p.values;
    w.scales = p.scales;
    w.view.scales.blocks = w.scales.data();
    w.compute_elements(c.info);
    const double largest = c.info.bits == 8 ? 448 : 6;
    for (std::size_t i = 0; i < in.size(); ++i) {
      const double scale = w.scale_at(c.info, i / 160, i % 160);
      const double v = std::clamp(to_float(in[i]) / scale, -largest, largest);
      const double got = w.elements[i] / scale;
      // Half a step of the element type at this magnitude, and an ulp of fp32.
      const int mantissa = c.info.bits == 8 ? 3 : 1, lowest = c.info.bits == 8 ? -6 : 0;
      const int exponent = std::max(v == 0 ? lowest : std::ilogb(v), lowest);
      ASSERT_LE(std::fabs(got - v), std::ldexp(0.5, exponent - mantissa) * (1 + 0x1p-20)) << v;
    }
  }
}

// The byte each rule gives, from the definition with exact numbers in double.
unsigned mx_byte(ScaleRule rule, int bits, double absmax) {
  const double largest = bits == 8 ? 448 : 6;
  const int e = bits == 8 ? 8 : 2, mantissa = bits == 8 ? 3 : 1;
  if (absmax == 0) return 0;
  int k;
  const double m = std::frexp(absmax, &k) * 2;  // in [1, 2); absmax = m * 2^(k - 1)
  k -= 1;
  int b = 0;
  const int up_mantissa = rule == ScaleRule::kCompressedTensors ? 1 : mantissa;
  switch (rule) {
    case ScaleRule::kFloor:
      b = k - e;
      break;
    case ScaleRule::kCeil:
      b = k + (m > 1) - e;
      break;
    case ScaleRule::kEven:
    case ScaleRule::kCompressedTensors:
      b = k + (m >= 2 - std::ldexp(0.5, -up_mantissa)) - e;
      break;
    default: {
      const float third = rule == ScaleRule::kTransformerEngine
                              ? static_cast<float>(absmax) * (1.0f / static_cast<float>(largest))
                              : static_cast<float>(absmax) / static_cast<float>(largest);
      int ke;
      const double me = std::frexp(static_cast<double>(third), &ke);
      b = me == 0.5 ? ke - 1 : ke;
    }
  }
  return static_cast<unsigned>(std::clamp(b + 127, 0, 254));
}

TEST(QuantizeMx, EachRuleGivesTheByteOfItsDefinition) {
  // Every exponent of fp32 with mantissas around each rule's bound; normal numbers only.
  std::vector<float> absmax;
  for (int k = -126; k <= 127; ++k)
    for (const double m : {1.0, 1.5, 1.75, 1.875, 1.9375})
      for (const float x : {static_cast<float>(std::ldexp(m, k))}) {
        absmax.push_back(x);
        absmax.push_back(std::nextafter(x, INFINITY));
        if (x > 0x1p-126f) absmax.push_back(std::nextafter(x, 0.0f));
      }
  for (const Case& c : every_case()) {
    if (c.kind != ScaleKind::kE8m0 || c.info.shape != BlockShape::kRow) continue;
    std::vector<float> in;
    const std::size_t block = c.info.smallest_block;
    for (const float a : absmax)
      for (std::size_t i = 0; i < block; ++i) in.push_back(i == 7 ? -a : a / 3);
    const Packed p = run_all(c, in, absmax.size(), block);
    for (std::size_t i = 0; i < absmax.size(); ++i)
      ASSERT_EQ(p.scales[i], mx_byte(c.rule, c.info.bits, absmax[i]))
          << c.info.name << " " << name_of(c.rule) << " " << absmax[i];
  }
}

TEST(QuantizeMx, SubnormalAndZeroBlocksHaveByteZero) {
  for (const Case& c : every_case()) {
    if (c.info.shape != BlockShape::kRow || c.kind != ScaleKind::kE8m0) continue;
    std::vector<float> in(64, 0.0f);
    in[33] = 0x1p-140f;
    const Packed p = run_all(c, in, 2, 32);
    EXPECT_EQ(p.scales[0], 0);
    EXPECT_EQ(p.scales[1], 0);
    for (const std::uint8_t v : p.values) EXPECT_EQ(v, 0);
  }
}

// A matrix ends where it likes: 41 blocks are no whole number of strips.
TEST(QuantizeNvfp4, MatricesWithScalesOfTheirOwnGiveWhatTheyGiveAlone) {
  constexpr std::size_t kBlocks = 41, kMatrices = 3, kElements = 16 * kBlocks;
  for (const Case& c : every_case()) {
    if (c.info.tensor_scale == TensorScale::kNone) continue;
    std::vector<Bf16> in;
    std::vector<TensorScales> tensors;
    Packed apart;
    for (unsigned m = 0; m < kMatrices; ++m) {
      const auto matrix = hard_input<Bf16>(kElements, 10 + m);
      tensors.push_back(choose_tensor_scales(c.info.kernels, c.rule, DType::kBFloat16,
                                             matrix.data(), kElements, serial_for));
      const Packed one = run_all(c, matrix, 1, kElements);
      in.insert(in.end(), matrix.begin(), matrix.end());
      apart.values.insert(apart.values.end(), one.values.begin(), one.values.end());
      apart.scales.insert(apart.scales.end(), one.scales.begin(), one.scales.end());
    }
    for (const auto& v : quantize_variants()) {
      if (v.format != c.info.kernels || v.isa > best_isa()) continue;
      Packed together;
      QuantizeJob job = job_for(c, in, kMatrices, kElements, {}, NonFinite::kError, together);
      job.tensors = tensors.data();
      job.blocks_per_tensor = kBlocks;
      together.bad = v.run(job, 0, job.blocks());
      EXPECT_TRUE(together == apart) << name_of(v.isa) << " " << name_of(c.rule);
    }
  }
}

TEST(QuantizeNvfp4, ErrorStaysWithinTheStepOfItsScale) {
  for (const Case& c : every_case()) {
    if (c.info.tensor_scale == TensorScale::kNone) continue;
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    std::vector<float> in(64 * 64);
    for (float& x : in) x = normal(random);
    const Packed p = run_all(c, in, 64, 64);
    const TensorScales tensor = choose_tensor_scales(c.info.kernels, c.rule, DType::kFloat32,
                                                     in.data(), in.size(), serial_for);
    for (std::size_t i = 0; i < in.size(); ++i) {
      const unsigned code = i % 2 == 0 ? p.values[i / 2] & 15u : p.values[i / 2] >> 4;
      const double scale = e4m3_reference(p.scales[i / 16]) * static_cast<double>(tensor.decode);
      // At 4 to 6 the step is 2; a scale rounded down by 1/16 lets 6.4 saturate.
      ASSERT_NEAR(e2m1_reference(code) * scale, in[i], 1.001 * scale) << name_of(c.rule);
    }
  }
}

TEST(QuantizeNonFiniteElements, TheErrorNamesTheFirstPosition) {
  for (const Case& c : every_case()) {
    auto in = hard_input<float>(256 * 320, 4);
    in[255 * 320 + 5] = NAN;
    in[100 * 320 + 300] = INFINITY;  // the first in the order of elements, not of square blocks
    Packed p;
    const TensorScales tensor = choose_tensor_scales(c.info.kernels, c.rule, DType::kFloat32,
                                                     in.data(), in.size(), serial_for);
    const QuantizeJob job = job_for(c, in, 256, 320, tensor, NonFinite::kError, p);
    ThreadPool pool(3);
    EXPECT_EQ(quantize(job, [&](std::size_t count, std::size_t,
                                ParallelBody body) { pool.parallel_for(count, 1, body); }),
              100u * 320 + 300);
  }
}

TEST(QuantizeNonFiniteElements, SaturateLeavesThemOutOfTheScale) {
  for (const Case& c : every_case()) {
    const std::size_t block = c.info.smallest_block;
    std::vector<float> in(block * 2, 0.25f), finite = in;
    in[0] = NAN;
    in[1] = INFINITY;
    in[2] = -INFINITY;
    in[3] = finite[3] = -0.5f;
    const Packed got = run_all(c, in, 1, in.size(), NonFinite::kSaturate);
    const Packed want = run_all(c, finite, 1, in.size(), NonFinite::kSaturate);
    EXPECT_EQ(got.scales, want.scales);
    const unsigned largest = c.info.bits == 8 ? 0x7e : 7, sign = c.info.bits == 8 ? 0x80 : 8;
    const auto code = [&](std::size_t i) {
      return c.info.bits == 8 ? got.values[i] : got.values[i / 2] >> (i % 2 * 4) & 15u;
    };
    EXPECT_EQ(code(0), 0u);
    EXPECT_EQ(code(1), largest);
    EXPECT_EQ(code(2), largest | sign);
  }
}

}  // namespace
}  // namespace monograph
