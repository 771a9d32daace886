// The table. None of its rows was measured: no report of a card exists. They are the lower ends of
// what bitsandbytes 0.50 found for its own kernels on weights of 4M elements and more (16 to 64
// rows on sm_90, 16 to 128 on sm_80, 256 on sm_89), and never more than our kernels take. A report
// of `monograph doctor --device cuda` changes the row of its architecture here.
#include "monograph/gpu/crossover.h"

#include <algorithm>

namespace monograph::gpu {
namespace {

constexpr Crossover kCrossovers[] = {
    {0, 16}, {80, 16}, {86, 32}, {89, 64}, {90, 16}, {100, 16}, {120, 32},
};

}  // namespace

std::span<const Crossover> crossovers() { return kCrossovers; }

std::size_t fused_rows(int capability, DType dtype) {
  const auto own = std::ranges::find(kCrossovers, capability, &Crossover::capability);
  const Crossover& row = own == std::end(kCrossovers) ? kCrossovers[0] : *own;
  return std::min(row.fused_rows, most_fused_rows(dtype));
}

}  // namespace monograph::gpu
