#include "monograph/adapter/factor_order.h"

namespace monograph {

std::vector<FactorOrder> factor_orders(std::span<const FactorShape> parameters) {
  using enum FactorOrder;
  std::vector<FactorOrder> orders;
  FactorOrder shown = kEither;
  for (const auto& [a_cols, b_rows, stack] : parameters) {
    const std::uint64_t outputs = (*stack)[1], inputs = (*stack)[2];
    const bool fits = a_cols == inputs && b_rows == outputs;
    const bool fits_swapped = a_cols == outputs && b_rows == inputs;
    orders.push_back(fits && fits_swapped ? kEither
                     : fits               ? kStraight
                     : fits_swapped       ? kSwapped
                                          : kNeither);
    if (fits != fits_swapped) shown = orders.back();
  }
  for (FactorOrder& order : orders) {
    if (order == kEither) order = shown;
  }
  return orders;
}

}  // namespace monograph
