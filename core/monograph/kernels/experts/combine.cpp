// Sums over slots whose rows were computed elsewhere.
#include <vector>

#include "monograph/base/error.h"
#include "monograph/kernels/experts/factors.h"
#include "monograph/kernels/experts/kernels.h"
#include "monograph/kernels/experts/routing.h"
#include "monograph/kernels/linear/products.h"

namespace monograph {

void combine_slots(const SlotSums& sums, void* out, ParallelFor parallel_for) {
  const ExpertsKernels& kernels = pick_experts(sums.dtype);
  const std::size_t all = sums.tokens * sums.slots, cols = sums.rows.cols;
  std::vector<std::uint32_t> places(all, kSkippedRow);
  for (std::size_t slot = 0; slot < all; ++slot)
    if (static_cast<std::uint64_t>(sums.places[slot]) < sums.rows.rows)
      places[slot] = static_cast<std::uint32_t>(sums.places[slot]);
  std::vector<float> weights(sums.weights == nullptr ? 0 : all);
  if (!weights.empty())
    convert(sums.weights, sums.weights_dtype, all, weights.data(), DType::kFloat32);
  const std::size_t row_bytes = cols * size_bytes(sums.dtype);
  each_rows(sums.tokens, cols * sums.slots, parallel_for, [&](std::size_t begin, std::size_t end) {
    for (std::size_t token = begin; token < end; ++token) {
      const std::size_t slot = token * sums.slots;
      kernels.sum_slots({sums.rows.data, sums.rows.stride, cols, places.data() + slot,
                         weights.empty() ? nullptr : weights.data() + slot, sums.slots,
                         static_cast<std::byte*>(out) + token * row_bytes});
    }
  });
}

}  // namespace monograph
