// The order of summation of avx512_bf16 in scalar code, to the bit: by the instruction where the
// CPU has it, by an emulation of it on every CPU with AVX-512.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/formats/tests/small_weights.h"
#include "monograph/kernels/dequantize/dequantize.h"
#include "monograph/kernels/linear/tests/decoded_weight.h"
#include "monograph/kernels/linear/tests/emulated_pairs.h"

namespace monograph {
namespace {

constexpr Pass kPasses[] = {Pass::kForward, Pass::kDx};

float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// Two rounded steps, the second term of the word first.
float add_word(float sum, const float (&x)[2], const float (&w)[2]) {
  sum = flushed(std::fma(flushed(x[1]), flushed(w[1]), flushed(sum)));
  return flushed(std::fma(flushed(x[0]), flushed(w[0]), sum));
}

// Elements [row][col]; zeros outside.
struct Elements {
  std::vector<float> values;
  std::size_t rows, cols;
  Elements(const Bytes& bf16, std::size_t r, std::size_t c) : values(r * c), rows(r), cols(c) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      Bf16 element;
      std::memcpy(&element, bf16.data() + 2 * i, 2);
      values[i] = to_float(element);
    }
  }
  float operator()(std::size_t r, std::size_t c) const {
    return r < rows && c < cols ? values[r * cols + c] : 0.0f;
  }
};

float forward(const Elements& x, const Elements& w, std::size_t m, std::size_t n, float had,
              bool first) {
  for (std::size_t c = 0; c < w.cols; c += 1024, first = false) {
    float lanes[16] = {};
    for (std::size_t k = c; k < c + 1024 && k < w.cols; k += 32)
      for (std::size_t i = 0; i < 16; ++i)
        lanes[i] =
            add_word(lanes[i], {x(m, k + i), x(m, k + 16 + i)}, {w(n, k + i), w(n, k + 16 + i)});
    float q[4];
    for (std::size_t i = 0; i < 4; ++i)
      q[i] = (lanes[4 * i] + lanes[4 * i + 2]) + (lanes[4 * i + 1] + lanes[4 * i + 3]);
    const float total = (q[0] + q[2]) + (q[1] + q[3]);
    had = first ? total : had + total;
  }
  return had;
}

float dx(const Elements& g, const Elements& w, std::size_t m, std::size_t k) {
  float had = 0;
  for (std::size_t c = 0; c < w.rows; c += 512) {
    float total = 0;
    for (std::size_t chain = c; chain < c + 512 && chain < w.rows; chain += 32) {
      float sum = 0;
      for (std::size_t n = chain; n < chain + 32 && n < w.rows; n += 2)
        sum = add_word(sum, {g(m, n), g(m, n + 1)}, {w(n, k), w(n + 1, k)});
      total += sum;
    }
    had = c == 0 ? total : had + total;
  }
  return had;
}

Bytes bits_of(float x) {
  const Bf16 rounded = from_float<Bf16>(x != x ? std::bit_cast<float>(0x7fc00000u) : x);
  Bytes bytes(2);
  std::memcpy(bytes.data(), &rounded, 2);
  return bytes;
}

Bytes expected(Pass pass, const Bytes& left, std::size_t m, const Elements& w) {
  const Elements x(left, m, pass == Pass::kForward ? w.cols : w.rows);
  Bytes out;
  for (std::size_t r = 0; r < m; ++r)
    for (std::size_t p = 0; p < (pass == Pass::kForward ? w.rows : w.cols); ++p) {
      const Bytes one =
          bits_of(pass == Pass::kForward ? forward(x, w, r, p, 0.0f, true) : dx(x, w, r, p));
      out.insert(out.end(), one.begin(), one.end());
    }
  return out;
}

// The emulation, and where the CPU has it the instruction.
std::vector<const LinearKernels*> kernels_of(Pass pass) {
  if (best_isa() < Isa::kAvx512) return {};
  std::vector<const LinearKernels*> kernels = {&emulated_pairs(pass)};
  for (const LinearVariant& variant : linear_variants())
    if (variant.isa == Isa::kAvx512Bf16 && variant.isa <= best_isa() && variant.pass == pass)
      kernels.push_back(variant.run);
  return kernels;
}

void check(const Bytes& dense, const LinearWeight& weight,
           std::initializer_list<std::size_t> batches) {
  const std::size_t rows = weight.packed.rows, cols = weight.packed.cols;
  const Elements elements(dense, rows, cols);
  for (const Pass pass : kPasses)
    for (const std::size_t m : batches) {
      const Bytes left =
          random_elements(DType::kBFloat16, m * (pass == Pass::kForward ? cols : rows), 5);
      const Bytes want = expected(pass, left, m, elements);
      for (const LinearKernels* kernels : kernels_of(pass))
        ASSERT_EQ(product(*kernels, DType::kBFloat16, pass, left, m, weight), want)
            << (pass == Pass::kForward ? "forward " : "dx ") << rows << "x" << cols << ", " << m
            << " rows, kernels " << (kernels == &emulated_pairs(pass) ? "emulated" : "native");
    }
}

TEST(LinearPairs, PlainWeightsOfEveryTail) {
  if (best_isa() < Isa::kAvx512) GTEST_SKIP() << "no AVX-512";
  unsigned seed = 0;
  for (const std::size_t n : {1u, 8u, 31u, 70u})
    for (const std::size_t k : {1u, 15u, 32u, 49u, 130u}) {
      const Bytes dense = random_elements(DType::kBFloat16, n * k, ++seed);
      check(dense, plain_weight(dense, n, k, DType::kBFloat16), {1, 3, 12, 13, 16, 17, 50});
    }
  const Bytes dense = random_elements(DType::kBFloat16, 1100 * 2070, ++seed);
  check(dense, plain_weight(dense, 9, 2070, DType::kBFloat16), {2, 20});
  check(dense, plain_weight(dense, 1100, 21, DType::kBFloat16), {2, 20});
}

TEST(LinearPairs, PackedWeights) {
  if (best_isa() < Isa::kAvx512) GTEST_SKIP() << "no AVX-512";
  struct Kind {
    const char* format;
    ScaleKind scales;
    std::size_t block;
    bool nested;
  };
  constexpr Kind kKinds[] = {
      {"nf4", ScaleKind::kFp32, 64, true},        {"nf4", ScaleKind::kFp32, 32, true},
      {"fp4", ScaleKind::kFp32, 256, true},       {"mxfp4", ScaleKind::kE8m0, 32, false},
      {"mxfp8", ScaleKind::kE8m0, 32, false},     {"nvfp4", ScaleKind::kE4m3, 16, false},
      {"fp8-block", ScaleKind::kBf16, 128, false}};
  unsigned seed = 0;
  for (const Kind& kind : kKinds)
    for (const std::size_t k : {96u, 1120u}) {
      const SmallWeight w =
          small_weight(kind.format, kind.scales, kind.block, kind.nested, {35, k}, ++seed);
      SCOPED_TRACE(w.name);
      Bytes dense(2 * 35 * k);
      dequantize(w.view, DType::kBFloat16, dense.data(), serial_for);
      check(dense, {w.view}, {1, 5, 33});
    }
}

// Tiny, subnormal, infinite and NaN operands; sums that pass through the subnormal range.
TEST(LinearPairs, SubnormalNumbersAreZerosAndNaNStays) {
  if (best_isa() < Isa::kAvx512) GTEST_SKIP() << "no AVX-512";
  constexpr std::size_t kN = 64, kK = 64, kM = 20;
  const auto elements = [](std::size_t count, unsigned exponent) {
    Bytes bytes = random_elements(DType::kBFloat16, count, exponent);
    for (std::size_t i = 0; i < count; ++i) {
      std::uint16_t bits;
      std::memcpy(&bits, bytes.data() + 2 * i, 2);
      const std::size_t e = i % 7 == 0 ? 0 : exponent + i % 5;
      bits = static_cast<std::uint16_t>((bits & 0x807f) | e << 7);
      std::memcpy(bytes.data() + 2 * i, &bits, 2);
    }
    return bytes;
  };
  Bytes dense = elements(kN * kK, 62);
  const Bytes left = elements(kM * 64, 64);
  const auto run = [&] {
    for (const Pass pass : kPasses) {
      const Bytes want = expected(pass, left, kM, Elements(dense, kN, kK));
      for (const LinearKernels* kernels : kernels_of(pass))
        ASSERT_EQ(product(*kernels, DType::kBFloat16, pass, left, kM,
                          plain_weight(dense, kN, kK, DType::kBFloat16)),
                  want);
    }
  };
  run();
  const std::uint16_t special[] = {0x7f80, 0xff80, 0x7fc0, 0x0001};
  std::memcpy(dense.data() + 2 * 777, special, sizeof special);
  run();

  // One subnormal times one: zero, where fp32 keeps it.
  const Bytes subnormal = {0x40, 0x00}, one = {0x80, 0x3f}, zero = {0, 0};
  for (const Pass pass : kPasses) {
    for (const LinearKernels* kernels : kernels_of(pass)) {
      EXPECT_EQ(product(*kernels, DType::kBFloat16, pass, one, 1,
                        plain_weight(subnormal, 1, 1, DType::kBFloat16)),
                zero);
      EXPECT_EQ(product(*kernels, DType::kBFloat16, pass, subnormal, 1,
                        plain_weight(one, 1, 1, DType::kBFloat16)),
                zero);
    }
    for (const LinearVariant& variant : linear_variants())
      if (variant.isa == Isa::kAvx512 && variant.pass == pass &&
          variant.dtype == DType::kBFloat16) {
        EXPECT_EQ(product(*variant.run, DType::kBFloat16, pass, one, 1,
                          plain_weight(subnormal, 1, 1, DType::kBFloat16)),
                  subnormal);
      }
  }
}

// The low-rank part is a further term of the same sum.
TEST(LinearPairs, TheLowRankPartContinuesTheSum) {
  if (best_isa() < Isa::kAvx512) GTEST_SKIP() << "no AVX-512";
  constexpr std::size_t kN = 11, kK = 70, kRank = 5;
  for (const std::size_t m : {2u, 19u}) {
    const auto matrix = [](const Bytes& bytes, std::size_t rows, std::size_t cols) {
      return Matrix{bytes.data(), rows, cols, cols};
    };
    const Bytes x = random_elements(DType::kBFloat16, m * kK, 1);
    const Bytes w = random_elements(DType::kBFloat16, kN * kK, 2);
    const Bytes xa = random_elements(DType::kBFloat16, m * kRank, 3);
    const Bytes b = random_elements(DType::kBFloat16, kN * kRank, 4);
    const Elements ex(x, m, kK), ew(w, kN, kK), ea(xa, m, kRank), eb(b, kN, kRank);
    Bytes want;
    for (std::size_t r = 0; r < m; ++r)
      for (std::size_t n = 0; n < kN; ++n) {
        const Bytes one = bits_of(forward(ea, eb, r, n, forward(ex, ew, r, n, 0.0f, true), false));
        want.insert(want.end(), one.begin(), one.end());
      }
    const LinearTerm low_rank = {matrix(xa, m, kRank),
                                 plain_weight(b, kN, kRank, DType::kBFloat16)};
    for (const LinearKernels* kernels : kernels_of(Pass::kForward)) {
      Bytes y(2 * m * kN);
      const LinearOutput output = {plain_weight(w, kN, kK, DType::kBFloat16),
                                   {&low_rank, 1},
                                   nullptr,
                                   {y.data(), m, kN, kN}};
      linear_with(*kernels, DType::kBFloat16, matrix(x, m, kK), {&output, 1}, serial_for);
      EXPECT_EQ(y, want) << m << " rows";
    }
  }
}

}  // namespace
}  // namespace monograph
