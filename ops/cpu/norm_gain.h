// The gain of a norm, read and converted: what rms_norm and the norm of heads in rotary share.
#pragma once

#include <optional>
#include <vector>

#include "monograph/kernels/rms_norm/rms_norm.h"
#include "stable.h"

namespace monograph::ops {

// [cols] in float32: the weight in its own type, 1 + weight, or ones. Empty where there are no
// rows: beside them cols may be anything.
std::vector<float> gain_of(const char* op, const char* what, const std::optional<Tensor>& weight,
                           std::size_t rows, std::size_t cols, bool one_plus_weight);

float epsilon_of(const char* op, double eps);

NormRounding rounding_of(bool round_before_weight);

}  // namespace monograph::ops
