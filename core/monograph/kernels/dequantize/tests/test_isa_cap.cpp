// MONOGRAPH_ISA holds for what a kernel picks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "monograph/cpu/isa.h"
#include "monograph/kernels/dequantize/dequantize.h"

namespace monograph {
namespace {

// The proof that the environment's cap reaches the choice: the function picked is a row of that
// level or below, and the best such row.
TEST(Isa, TheEnvironmentCapHoldsForWhatIsPicked) {
  const char* wanted = std::getenv("MONOGRAPH_ISA");
  const Isa limit = wanted == nullptr ? detected_isa() : capped_isa(detected_isa(), wanted);
  ASSERT_EQ(best_isa(), limit);
  for (const FormatInfo& info : formats()) {
    const auto& variants = dequantize_variants();
    const auto chosen = std::find_if(variants.begin(), variants.end(), [&](const auto& v) {
      return v.run == pick(variants, info.kernels) && v.format == info.kernels;
    });
    ASSERT_NE(chosen, variants.end());
    EXPECT_LE(chosen->isa, limit);
    for (const auto& v : variants)
      if (v.format == info.kernels && v.isa <= limit) EXPECT_LE(v.isa, chosen->isa);
  }
}

}  // namespace
}  // namespace monograph
