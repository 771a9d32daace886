// AVX2 and NEON are eight lanes, multiply-adds and one tree: their products are the same bits, on
// two processors that no test has side by side. Both are held to one hash.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <string>

#include "monograph/base/float_types.h"
#include "monograph/formats/tests/small_weights.h"
#include "monograph/kernels/linear/linear.h"
#include "monograph/kernels/linear/tests/product.h"

namespace monograph {
namespace {

// Of integers: a normal distribution takes logarithms, which C libraries round as they like.
Bytes exact_elements(DType dtype, std::size_t count) {
  std::mt19937 random(5);
  Bytes bytes(count * size_bytes(dtype));
  for (std::size_t i = 0; i < count; ++i)
    with_type(dtype, [&]<class T>() {
      const T element = from_float<T>((static_cast<float>(random() % 2001) - 1000.0f) / 512.0f);
      std::memcpy(bytes.data() + i * sizeof(T), &element, sizeof(T));
    });
  return bytes;
}

// FNV-1a.
void add_to(std::uint64_t& hash, const Bytes& bytes) {
  for (const std::uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001b3u;
}

// All formats with blocks of a row, fewer rows than a block has and more, tails of both.
std::uint64_t hash_of(const LinearVariant& variant) {
  using enum ScaleKind;
  const SmallWeight weights[] = {small_weight("nf4", kFp32, 64, true, {70, 1120}, 1),
                                 small_weight("fp4", kFp32, 32, false, {33, 544}, 2),
                                 small_weight("mxfp4", kE8m0, 32, false, {33, 512}, 3),
                                 small_weight("mxfp8", kE8m0, 32, false, {70, 288}, 4),
                                 small_weight("nvfp4", kE4m3, 16, false, {50, 528}, 5),
                                 small_weight("fp8-block", kBf16, 128, false, {140, 640}, 6)};
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const SmallWeight& w : weights)
    for (const std::size_t m : {1, 3, 10, 11, 49}) {
      const std::size_t in = variant.pass == Pass::kForward ? w.view.cols : w.view.rows;
      add_to(hash, product(*variant.run, variant.dtype, variant.pass,
                           exact_elements(variant.dtype, m * in), m, {w.view, variant.dtype}));
    }
  return hash;
}

std::uint64_t expected(DType dtype, Pass pass) {
  const bool forward = pass == Pass::kForward;
  if (dtype == DType::kBFloat16) return forward ? 0x80067376bb9d5e62u : 0xbe205c882d94bcb0u;
  if (dtype == DType::kFloat16) return forward ? 0xf44a113ff766d51au : 0x8cc961a80f14cdefu;
  return forward ? 0x2b28ac3fb5d79bd3u : 0xce29257fe09f1bf0u;
}

TEST(LinearEightLanes, Avx2AndNeonGiveTheSameBits) {
  bool ran = false;
  for (const LinearVariant& variant : linear_variants()) {
    if (variant.isa > best_isa() || (variant.isa != Isa::kAvx2 && variant.isa != Isa::kNeon))
      continue;
    ran = true;
    EXPECT_EQ(hash_of(variant), expected(variant.dtype, variant.pass))
        << name_of(variant.isa) << " " << name_of(variant.dtype)
        << (variant.pass == Pass::kForward ? " forward" : " dx");
  }
  if (!ran) GTEST_SKIP() << "neither AVX2 nor NEON";
}

}  // namespace
}  // namespace monograph
