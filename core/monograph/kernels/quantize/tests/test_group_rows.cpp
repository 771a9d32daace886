// Formats with groups of a row: scales, zero points and codes against plain C++, on every
// instruction set and for any number of threads.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/base/minifloat.h"
#include "monograph/formats/zero_points.h"
#include "monograph/kernels/quantize/quantize.h"

namespace monograph {
namespace {

struct Quantised {
  std::vector<std::uint8_t> values, scales, zeros;
  std::size_t bad = kAllFinite;
  bool operator==(const Quantised&) const = default;
};

// Scales in fp16 are of weights in fp16: those of others may lie beyond 65504. Operators refuse it.
template <class T>
bool has_room(const FormatInfo& info) {
  return info.kinds[0] != ScaleKind::kFp16 || dtype_of<T> == DType::kFloat16;
}

struct Shape {
  std::size_t rows, cols, block;
};
constexpr Shape kShapes[] = {{33, 500, 500}, {33, 500, 20}, {16, 512, 128}, {7, 9, 3}, {5, 7, 7}};

template <class T>
QuantizeJob job_for(const FormatInfo& info, ScaleRule rule, const Shape& shape,
                    const std::vector<T>& in, Quantised& out) {
  QuantizeJob job = {};
  job.format = info.kernels;
  job.dtype = dtype_of<T>;
  job.input = in.data();
  job.elements = in.size();
  job.block = shape.block;
  job.rule = rule;
  job.kind = info.kinds[0];
  job.shape = info.shape;
  job.matrix_rows = shape.rows;
  job.cols = shape.cols;
  job.row_bytes = row_bytes(info, shape.cols);
  job.add_half = info.zero_points == ZeroPoints::kPacked && info.bits == 8;
  out.values.assign(packed_bytes(info, shape.rows, shape.cols), 0xa5);
  out.scales.assign(job.blocks() * size_bytes(job.kind), 0xa5);
  out.zeros.assign(rule == ScaleRule::kMinMax ? job.blocks() : 0, 0xa5);
  job.values = out.values.data();
  job.scales = out.scales.data();
  job.zeros = out.zeros.empty() ? nullptr : out.zeros.data();
  return job;
}

// Ties of every code, rows of zeros, of one sign, and of all magnitudes that T has.
template <class T>
std::vector<T> hard_input(const Shape& shape, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<T> in(shape.rows * shape.cols);
  const int range = dtype_of<T> == DType::kFloat16 ? 12 : 60;
  for (std::size_t row = 0; row < shape.rows; ++row) {
    const int exponent = static_cast<int>(row * 37 % 60) % range - range / 2;
    for (std::size_t col = 0; col < shape.cols; ++col) {
      const int sign = row % 5 == 1 ? 1 : row % 5 == 2 ? -1 : random() % 2 == 0 ? 1 : -1;
      const float tie = static_cast<float>(random() % 61) / 4;
      const float smooth = static_cast<float>(random() % 65536) / 4096;
      const float x = row % 7 == 3 ? 0.0f : random() % 2 == 0 ? tie : smooth;
      in[row * shape.cols + col] =
          from_float<T>(static_cast<float>(sign) * std::ldexp(x, exponent));
    }
  }
  return in;
}

template <class T>
float rounded(float x) {
  return to_float(from_float<T>(x));
}

float scale_of(const FormatInfo& info, const Quantised& q, std::size_t group) {
  if (info.kinds[0] == ScaleKind::kFp32) return load_f32(q.scales.data() + 4 * group);
  std::uint16_t bits;
  std::memcpy(&bits, q.scales.data() + 2 * group, 2);
  return info.kinds[0] == ScaleKind::kFp16 ? to_float(Fp16{bits}) : to_float(Bf16{bits});
}

// The rules of row_groups.h, one element at a time.
template <class T>
void check_elements(const FormatInfo& info, const Shape& shape, const std::vector<T>& in,
                    const Quantised& q) {
  const bool integer = info.zero_points != ZeroPoints::kNone;
  const float lowest = !integer ? -448.0f : info.bits == 4 ? -8.0f : -128.0f;
  const float highest = !integer ? 448.0f : -lowest - 1;
  const std::size_t groups = shape.cols / shape.block;
  for (std::size_t i = 0; i < in.size(); ++i) {
    const std::size_t row = i / shape.cols, col = i % shape.cols;
    const std::size_t group = row * groups + col / shape.block;
    const float scale = scale_of(info, q, group);
    ASSERT_TRUE(std::isfinite(scale) && scale > 0);
    const float zero =
        q.zeros.empty() ? 0.0f : static_cast<float>(static_cast<std::int8_t>(q.zeros[group]));
    const float number = rounded<T>(rounded<T>(to_float(in[i]) / scale) + zero);
    const float clamped = std::fmin(std::fmax(number, lowest), highest);
    const std::uint8_t* at = q.values.data() + row * row_bytes(info, shape.cols);
    const unsigned byte = info.bits == 4 ? at[col / 2] >> (col % 2 * 4) & 15 : at[col];
    if (!integer) {
      ASSERT_EQ(byte, E4m3::encode(clamped)) << info.name << " " << i;
    } else {
      const int stored = info.zero_points == ZeroPoints::kBytes
                             ? static_cast<int>(static_cast<std::int8_t>(byte))
                             : static_cast<int>(byte) - (1 << (info.bits - 1));
      ASSERT_EQ(stored, static_cast<int>(std::nearbyint(clamped))) << info.name << " " << i;
    }
  }
}

template <class T>
class QuantizeGroups : public testing::Test {};
using InputTypes = testing::Types<float, Bf16, Fp16>;
TYPED_TEST_SUITE(QuantizeGroups, InputTypes);

TYPED_TEST(QuantizeGroups, VariantsAgreeAndEveryElementFollowsTheRule) {
  for (const FormatInfo& info : formats()) {
    if (info.shape != BlockShape::kGroup || !has_room<TypeParam>(info)) continue;
    for (const ScaleRule rule : info.rules) {
      for (const Shape& shape : kShapes) {
        SCOPED_TRACE(std::string(info.name) + " " + name_of(rule));
        const auto in = hard_input<TypeParam>(shape, 1);
        Quantised first;
        for (const auto& v : quantize_variants()) {
          if (v.format != info.kernels || v.isa > best_isa()) continue;
          Quantised got;
          const QuantizeJob job = job_for(info, rule, shape, in, got);
          got.bad = v.run(job, 0, job.blocks());
          if (first.values.empty()) first = got;
          EXPECT_TRUE(got == first) << name_of(v.isa);
        }
        ASSERT_FALSE(first.values.empty());
        EXPECT_EQ(first.bad, kAllFinite);
        check_elements(info, shape, in, first);
        for (const int threads : {1, 3}) {
          ThreadPool pool(threads);
          Quantised got;
          const QuantizeJob job = job_for(info, rule, shape, in, got);
          EXPECT_FALSE(quantize(job, [&](std::size_t n, std::size_t grain, ParallelBody body) {
            pool.parallel_for(n, grain, body);
          }));
          EXPECT_TRUE(got == first) << threads;
        }
      }
    }
  }
}

TYPED_TEST(QuantizeGroups, TheFirstNumberThatIsNotFiniteIsNamed) {
  for (const FormatInfo& info : formats()) {
    if (info.shape != BlockShape::kGroup) continue;
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), INFINITY, -INFINITY}) {
      const Shape shape = kShapes[1];
      auto in = hard_input<TypeParam>(shape, 2);
      in[7031] = in[12000] = from_float<TypeParam>(bad);
      Quantised got;
      const QuantizeJob job = job_for(info, info.rules.front(), shape, in, got);
      EXPECT_EQ(quantize(job, serial_for), std::optional<std::size_t>(7031));
    }
  }
}

TEST(ZeroPoints, ArePackedAlongTheRows) {
  for (const Format format : {Format::kInt4Bf16, Format::kInt8PackedBf16, Format::kInt8Bf16}) {
    const FormatInfo& info = *find_format(format);
    constexpr std::size_t kRows = 13, kGroups = 3;
    std::vector<std::uint8_t> zeros(kRows * kGroups);
    const int half = 1 << (info.bits - 1);
    for (std::size_t i = 0; i < zeros.size(); ++i)
      zeros[i] = static_cast<std::uint8_t>(static_cast<int>(i * 37 % (2 * half)) - half);
    std::vector<std::uint8_t> stored(zero_point_bytes(info, kRows, kGroups), 0xa5);
    store_zero_points(info, kRows, kGroups, zeros.data(), stored.data());
    if (info.zero_points == ZeroPoints::kBytes) {
      EXPECT_EQ(stored, zeros);
      continue;
    }
    const std::size_t per_word = 32 / static_cast<std::size_t>(info.bits);
    for (std::size_t row = 0; row < ceil_div(kRows, per_word) * per_word; ++row)
      for (std::size_t group = 0; group < kGroups; ++group) {
        std::uint32_t word;
        std::memcpy(&word, stored.data() + 4 * (row / per_word * kGroups + group), 4);
        const std::uint32_t field =
            word >> (row % per_word * static_cast<std::size_t>(info.bits)) & (2u * half - 1);
        const int want =
            row < kRows ? static_cast<std::int8_t>(zeros[row * kGroups + group]) + half : 0;
        EXPECT_EQ(field, static_cast<std::uint32_t>(want)) << info.name << " " << row;
      }
  }
}

}  // namespace
}  // namespace monograph
