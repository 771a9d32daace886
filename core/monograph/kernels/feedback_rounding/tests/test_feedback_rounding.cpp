#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "monograph/base/float_types.h"
#include "monograph/formats/all.h"
#include "monograph/formats/bind.h"
#include "monograph/formats/zero_points.h"
#include "monograph/kernels/feedback_rounding/feedback_rounding.h"

namespace monograph {
namespace {

std::vector<double> random_values(std::size_t count, unsigned seed, double size) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0.0, size);
  std::vector<double> values(count);
  for (double& value : values) value = normal(random);
  return values;
}

double value_of(Format format, std::uint32_t code) {
  switch (format) {
    case Format::kNf4:
      return Nf4::kValues[code];
    case Format::kFp4:
      return Fp4::kValues[code];
    case Format::kMxfp8:
    case Format::kFp8Block:
    case Format::kFp8RowBf16:
      return code % 128 == 127 ? NAN : E4m3::decode(code);
    case Format::kInt4Bf16:
    case Format::kInt8Bf16:
      return static_cast<std::int8_t>(code);
    default:
      return Mxfp4::kValues[code];
  }
}

bool is_integer(Format format) {
  return format == Format::kInt4Bf16 || format == Format::kInt8Bf16;
}
bool is_e4m3(Format format) {
  return format == Format::kMxfp8 || format == Format::kFp8Block || format == Format::kFp8RowBf16;
}
// As a code says it; of four bits integers lie at both ends of a byte.
bool is_code(Format format, std::uint32_t code) {
  if (format == Format::kInt4Bf16) return code < 8 || code >= 248;
  return code < 16 || is_e4m3(format) || format == Format::kInt8Bf16;
}

// What a model reads for a code.
double stored_value(Format format, DType dtype, std::uint32_t code, float scale, double zero) {
  return with_type(dtype, [&]<class T>() -> double {
    return to_float(from_float<T>(static_cast<float>(value_of(format, code) - zero) * scale));
  });
}

// The code whose value is nearest; of equally near ones the smallest code.
std::uint32_t nearest_code(Format format, double x, float scale, double zero) {
  std::uint32_t best = 0;
  double distance = INFINITY;
  for (std::uint32_t code = 0; code < 256; ++code) {
    if (!is_code(format, code)) continue;
    const double found = std::fabs((value_of(format, code) - zero) * scale - x);
    if (found < distance) distance = found, best = code;
  }
  return best;
}

std::vector<FeedbackFn*> variants_of(Format format) {
  std::vector<FeedbackFn*> found;
  for (const auto& variant : feedback_variants()) {
    if (variant.format == format && variant.isa <= best_isa()) found.push_back(variant.run);
  }
  return found;
}

// x with matrix x = right, by elimination with pivots.
std::vector<double> solved(std::vector<double> m, std::vector<double> right) {
  const std::size_t n = right.size();
  for (std::size_t i = 0; i < n; ++i) {
    std::size_t pivot = i;
    for (std::size_t r = i + 1; r < n; ++r)
      if (std::fabs(m[r * n + i]) > std::fabs(m[pivot * n + i])) pivot = r;
    for (std::size_t j = 0; j < n; ++j) std::swap(m[i * n + j], m[pivot * n + j]);
    std::swap(right[i], right[pivot]);
    for (std::size_t r = i + 1; r < n; ++r) {
      const double f = m[r * n + i] / m[i * n + i];
      for (std::size_t j = i; j < n; ++j) m[r * n + j] -= f * m[i * n + j];
      right[r] -= f * right[i];
    }
  }
  for (std::size_t i = n; i-- > 0;) {
    for (std::size_t j = i + 1; j < n; ++j) right[i] -= m[i * n + j] * right[j];
    right[i] /= m[i * n + i];
  }
  return right;
}

struct Problem {
  Format format;
  DType dtype;
  std::size_t rows, cols, directions;
  std::vector<double> input, g, d;
  std::vector<float> scales, zeros;  // zero points of integers; 0 elsewhere

  Problem(Format f, DType t, std::size_t r, std::size_t c, std::size_t k, unsigned seed)
      : format(f), dtype(t), rows(r), cols(c), directions(k) {
    input = random_values(rows * cols, seed, 0.3);
    g = random_values(cols * directions, seed + 1, 8.0);
    d.assign(cols, 1.0);
    const double largest = is_e4m3(format)                                    ? 448
                           : format == Format::kNf4 || format == Format::kFp4 ? 1
                           : format == Format::kInt8Bf16                      ? 120
                                                                              : 6;
    for (const double x : random_values(rows * cols, seed + 2, 0.1)) {
      scales.push_back(static_cast<float>((0.7 + std::fabs(x)) / largest));
      const double most = format == Format::kInt8Bf16 ? 400 : 25;
      zeros.push_back(is_integer(format) ? static_cast<float>(std::round(most * x)) : 0.0f);
    }
  }

  std::vector<std::uint8_t> run(FeedbackFn* kernel) const {
    const FeedbackRows rows_of = feedback_rows(g, d, directions);
    std::vector<std::uint8_t> codes(rows * cols);
    std::vector<double> sums(rows_of.directions * kFeedbackLanes, 1e9);
    for (std::size_t row = 0; row < rows; row += kFeedbackLanes) {
      kernel({dtype, cols, rows_of.directions, rows_of.g.data(), rows_of.c.data(),
              input.data() + row * cols, scales.data() + row * cols, codes.data() + row * cols,
              sums.data(), is_integer(format) ? zeros.data() + row * cols : nullptr},
             std::min(kFeedbackLanes, rows - row));
    }
    return codes;
  }

  // c[i] by solving with P[i], rows one after another.
  std::vector<std::uint8_t> expected() const {
    const std::size_t k = directions;
    std::vector<double> p(k * k), c(cols * k);
    for (std::size_t a = 0; a < k; ++a) p[a * k + a] = 1;
    for (std::size_t i = cols; i-- > 0;) {
      const double* at = g.data() + i * k;
      for (std::size_t a = 0; a < k; ++a)
        for (std::size_t b = 0; b < k; ++b) p[a * k + b] += at[a] * at[b] / d[i];
      const std::vector<double> x = solved(p, {at, at + k});
      for (std::size_t a = 0; a < k; ++a) c[i * k + a] = x[a] / d[i];
    }
    std::vector<std::uint8_t> codes;
    for (std::size_t row = 0; row < rows; ++row) {
      std::vector<double> s(k);
      for (std::size_t i = 0; i < cols; ++i) {
        const double w = input[row * cols + i];
        double target = w;
        for (std::size_t a = 0; a < k; ++a) target -= s[a] * c[i * k + a];
        const float scale = scales[row * cols + i], zero = zeros[row * cols + i];
        codes.push_back(static_cast<std::uint8_t>(nearest_code(format, target, scale, zero)));
        const double q = stored_value(format, dtype, codes.back(), scale, zero);
        for (std::size_t a = 0; a < k; ++a) s[a] += (q - w) * g[i * k + a];
      }
    }
    return codes;
  }

  // GPTQ as it was published, with the dense matrix diag(d) + G G^T.
  std::vector<std::uint8_t> dense() const {
    std::vector<double> h(cols * cols), inverse(cols * cols);
    for (std::size_t i = 0; i < cols; ++i)
      for (std::size_t j = 0; j < cols; ++j) {
        h[i * cols + j] = i == j ? d[i] : 0;
        for (std::size_t a = 0; a < directions; ++a)
          h[i * cols + j] += g[i * directions + a] * g[j * directions + a];
      }
    // Gauss and Jordan; the matrix is positive definite.
    for (std::size_t i = 0; i < cols; ++i) inverse[i * cols + i] = 1;
    for (std::size_t i = 0; i < cols; ++i) {
      const double pivot = h[i * cols + i];
      for (std::size_t j = 0; j < cols; ++j)
        h[i * cols + j] /= pivot, inverse[i * cols + j] /= pivot;
      for (std::size_t r = 0; r < cols; ++r) {
        const double factor = h[r * cols + i];
        if (r == i || factor == 0) continue;
        for (std::size_t j = 0; j < cols; ++j) {
          h[r * cols + j] -= factor * h[i * cols + j];
          inverse[r * cols + j] -= factor * inverse[i * cols + j];
        }
      }
    }
    std::vector<double> w = input;
    std::vector<std::uint8_t> codes(rows * cols);
    for (std::size_t i = 0; i < cols; ++i) {
      const double diagonal = inverse[i * cols + i];
      for (std::size_t row = 0; row < rows; ++row) {
        const float scale = scales[row * cols + i], zero = zeros[row * cols + i];
        const std::uint32_t code = nearest_code(format, w[row * cols + i], scale, zero);
        codes[row * cols + i] = static_cast<std::uint8_t>(code);
        const double error =
            (w[row * cols + i] - stored_value(format, dtype, code, scale, zero)) / diagonal;
        for (std::size_t j = i; j < cols; ++j) w[row * cols + j] -= error * inverse[i * cols + j];
      }
      for (std::size_t a = i + 1; a < cols; ++a) {
        const double factor = inverse[a * cols + i] / diagonal;
        for (std::size_t b = i + 1; b < cols; ++b)
          inverse[a * cols + b] -= factor * inverse[i * cols + b];
      }
    }
    return codes;
  }
};

// Codes that stand for the same value count as equal.
double share_of_equal(Format format, const std::vector<std::uint8_t>& a,
                      const std::vector<std::uint8_t>& b) {
  std::size_t equal = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    equal += value_of(format, a[i]) == value_of(format, b[i]);
  return static_cast<double>(equal) / static_cast<double>(a.size());
}

constexpr Format kFormats[] = {Format::kNf4,      Format::kFp4,      Format::kMxfp4,
                               Format::kMxfp8,    Format::kNvfp4,    Format::kFp8Block,
                               Format::kInt4Bf16, Format::kInt8Bf16, Format::kFp8RowBf16};

TEST(FeedbackRounding, IsTheRecursionInDoubleInEveryFormatOnEveryInstructionSet) {
  for (const Format format : kFormats) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      Problem problem(format, dtype, 37, 200, 5, 3);
      for (std::size_t i = 0; i < problem.cols; i += 3) problem.d[i] = 0.01;
      const auto wanted = problem.expected();
      ASSERT_FALSE(variants_of(format).empty());
      for (FeedbackFn* run : variants_of(format)) {
        EXPECT_GE(share_of_equal(format, problem.run(run), wanted), 0.999)
            << static_cast<int>(format) << " " << static_cast<int>(dtype);
      }
    }
  }
}

TEST(FeedbackRounding, IsGptqWithTheDenseMatrix) {
  for (const Format format : kFormats) {
    for (const std::size_t directions : {1, 16, 40}) {
      Problem problem(format, DType::kFloat32, 64, 160, directions, 11);
      if (directions == 40) {
        for (std::size_t i = 0; i < problem.cols; ++i)
          problem.d[i] = 0.01 + 3 * std::fabs(std::sin(1.0 + static_cast<double>(i)));
      }
      const auto found = problem.run(pick(feedback_variants(), format));
      EXPECT_GE(share_of_equal(format, found, problem.dense()), 0.999)
          << static_cast<int>(format) << " " << directions;
    }
  }
}

TEST(FeedbackRounding, EveryVariantGivesTheSameCodesWhateverRowsGoTogether) {
  bool compared = false;
  for (const Format format : kFormats) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      for (const std::size_t directions : {1, 2, 3, 16, 33}) {
        for (const std::size_t cols : {1, 63, 64, 65, 130}) {
          Problem problem(format, dtype, 17, cols, directions, 5);
          problem.scales[cols - 1] = 0;
          std::vector<std::uint8_t> wanted;
          for (const auto& variant : feedback_variants()) {
            if (variant.format != format || variant.isa > best_isa()) continue;
            const auto codes = problem.run(variant.run);
            compared = compared || !wanted.empty();
            if (wanted.empty()) wanted = codes;
            ASSERT_EQ(codes, wanted) << name_of(variant.isa);
            EXPECT_EQ(value_of(format, codes[cols - 1]), problem.zeros[cols - 1]);
          }
          // The last row alone.
          Problem last = problem;
          last.rows = 1;
          last.input.erase(last.input.begin(), last.input.end() - static_cast<long>(cols));
          last.scales.erase(last.scales.begin(), last.scales.end() - static_cast<long>(cols));
          last.zeros.erase(last.zeros.begin(), last.zeros.end() - static_cast<long>(cols));
          const auto alone = last.run(pick(feedback_variants(), format));
          ASSERT_TRUE(std::equal(alone.begin(), alone.end(),
                                 wanted.end() - static_cast<std::ptrdiff_t>(cols)));
        }
      }
    }
  }
  EXPECT_TRUE(compared || best_isa() == Isa::kScalar);
}

TEST(FeedbackRounding, WithoutDirectionsItIsTheNearest) {
  for (const Format format : kFormats) {
    Problem problem(format, DType::kFloat32, 9, 100, 2, 7);
    std::fill(problem.g.begin(), problem.g.end(), 0.0);
    const auto codes = problem.run(pick(feedback_variants(), format));
    for (std::size_t i = 0; i < codes.size(); ++i) {
      const float scale = problem.scales[i], zero = problem.zeros[i];
      const std::uint32_t nearest = nearest_code(format, problem.input[i], scale, zero);
      const double found = (value_of(format, codes[i]) - zero) * scale;
      const double wanted = (value_of(format, nearest) - zero) * scale;
      // Equally near to the precision of the quotient in fp32.
      ASSERT_NEAR(std::fabs(found - problem.input[i]), std::fabs(wanted - problem.input[i]), 1e-6);
    }
  }
}

TEST(FeedbackRounding, BlocksMayStraddleRowsAndOddRowsShareBytes) {
  const std::size_t rows = 5, cols = 101;
  const Problem problem(Format::kNf4, DType::kBFloat16, rows, cols, 3, 13);
  std::vector<float> scales(ceil_div(rows * cols, 64));
  for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = 0.5f + 0.01f * static_cast<float>(i);
  Problem flat = problem;
  for (std::size_t i = 0; i < rows * cols; ++i) flat.scales[i] = scales[i / 64];
  std::vector<std::uint8_t> values(ceil_div(rows * cols, 2), 0xa5);
  const ByteSpan bytes[] = {
      {reinterpret_cast<const std::uint8_t*>(scales.data()), 4 * scales.size()}};
  const std::size_t shape[] = {rows, cols};
  const PackedView view =
      bind_packed(*find_format(Format::kNf4), 64, shape, {values.data(), values.size()}, bytes);
  std::vector<std::uint8_t> codes(rows * cols);
  round_with_feedback(view, 0, rows, DType::kBFloat16, feedback_rows(problem.g, problem.d, 3),
                      problem.input.data(), codes.data());
  EXPECT_EQ(codes, flat.run(pick(feedback_variants(), Format::kNf4)));
  pack_codes(Format::kNf4, codes.data(), codes.size(), values.data());
  for (std::size_t i = 0; i < codes.size(); ++i) {
    ASSERT_EQ(i % 2 == 0 ? values[i / 2] >> 4 : values[i / 2] & 15, codes[i]);
  }
  EXPECT_EQ(values.back() & 15, 5);  // not an element
}

// bf16, fp16 and fp32 scales of 1 + 2^-k that no other kind reads so, and packed zero points.
TEST(FeedbackRounding, TakesScalesAndZeroPointsOfGroupsAsTheyAreStored) {
  const std::size_t rows = 11, cols = 60, block = 20, groups = cols / block;
  for (const bool asymmetric : {false, true}) {
    for (const Format format :
         {Format::kInt4Bf16, Format::kInt4Fp16, Format::kInt4Fp32, Format::kInt8Bf16,
          Format::kInt8PackedFp16, Format::kInt8PackedFp32, Format::kFp8RowFp16}) {
      const FormatInfo& info = *find_format(format);
      if (asymmetric && info.zero_points == ZeroPoints::kNone) continue;
      Problem problem(info.kernels, DType::kFloat16, rows, cols, 3, 17);
      const std::size_t width = size_bytes(info.kinds.front());
      std::vector<std::uint8_t> scales(rows * groups * width), zeros(rows * groups);
      for (std::size_t i = 0; i < rows * groups; ++i) {
        const float scale =
            std::ldexp(1.0f + std::ldexp(1.0f, -static_cast<int>(i % 7)), info.bits == 4 ? -4 : -8);
        if (width == 4) {
          std::memcpy(&scales[4 * i], &scale, 4);
        } else if (info.kinds.front() == ScaleKind::kFp16) {
          const Fp16 half = from_float<Fp16>(scale);
          std::memcpy(&scales[2 * i], &half, 2);
        } else {
          const Bf16 half = from_float<Bf16>(scale);
          std::memcpy(&scales[2 * i], &half, 2);
        }
        const int zero = asymmetric ? static_cast<int>(i % 16) - 8 : 0;
        zeros[i] = static_cast<std::uint8_t>(zero);
        std::fill_n(problem.scales.begin() + static_cast<long>(i * block), block, scale);
        std::fill_n(problem.zeros.begin() + static_cast<long>(i * block), block,
                    static_cast<float>(zero));
      }
      std::vector<std::uint8_t> values(packed_bytes(info, rows, cols));
      std::vector<std::uint8_t> stored(zero_point_bytes(info, rows, groups));
      std::vector<ByteSpan> parts = {{scales.data(), scales.size()}};
      if (asymmetric) {
        store_zero_points(info, rows, groups, zeros.data(), stored.data());
        parts.push_back({stored.data(), stored.size()});
      }
      const std::size_t shape[] = {rows, cols};
      const PackedView view =
          bind_packed(info, block, shape, {values.data(), values.size()}, parts);
      std::vector<std::uint8_t> codes(rows * cols);
      round_with_feedback(view, 0, rows, DType::kFloat16, feedback_rows(problem.g, problem.d, 3),
                          problem.input.data(), codes.data());
      EXPECT_GE(share_of_equal(info.kernels, codes, problem.expected()), 0.999) << info.name;
      EXPECT_EQ(codes, problem.run(pick(feedback_variants(), info.kernels))) << info.name;
    }
  }
}

// A column after the other, against plain loops in the order that the header says.
TEST(FeedbackRounding, AStepHasTheSameBitsOnEveryInstructionSet) {
  const std::size_t cols = 9, directions = 6, lanes = kFeedbackLanes;
  const std::vector<double> g = random_values(cols * directions, 1, 1.0);
  const FeedbackRows rows = feedback_rows(g, std::vector<double>(cols, 0.5), directions);
  const std::vector<double> errors = random_values(cols * lanes, 2, 0.1);
  for (const auto& variant : feedback_step_variants()) {
    if (variant.isa > best_isa()) continue;
    std::vector<double> sums(directions * lanes), expected(directions * lanes), found(lanes);
    for (std::size_t i = 0; i < cols; ++i) {
      const double* c = rows.c.data() + (i + 1) * directions;
      variant.run({directions, rows.g.data() + i * directions, c, errors.data() + i * lanes,
                   sums.data(), found.data()});
      for (std::size_t lane = 0; lane < lanes; ++lane) {
        double even = 0, odd = 0;
        for (std::size_t d = 0; d < directions; ++d) {
          double& sum = expected[d * lanes + lane];
          sum += errors[i * lanes + lane] * rows.g[i * directions + d];
          (d % 2 == 0 ? even : odd) += sum * c[d];
        }
        ASSERT_EQ(found[lane], even + odd)
            << static_cast<int>(variant.isa) << " " << i << " " << lane;
      }
    }
    EXPECT_EQ(sums, expected);
  }
}

}  // namespace
}  // namespace monograph
