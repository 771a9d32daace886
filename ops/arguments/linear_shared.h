// Arguments that linear_shared and linear_shared_dx take as lists, one entry per weight.
#pragma once

#include "arguments/linear.h"

namespace monograph::ops {

// `layouts` holds the layout of each weight (packed.h) and behind it the number of its scales;
// `scales` the scales of all weights in order.
std::vector<LinearWeight> check_weights(const char* op, const std::vector<Tensor>& values,
                                        const std::vector<Tensor>& scales,
                                        const std::vector<std::int64_t>& layouts);

// None, or one for each of the n weights.
void check_count(const char* op, const char* what, const std::vector<Tensor>& list, std::size_t n);
void check_together(const char* op, const char* first, const std::vector<Tensor>& one,
                    const char* second, const std::vector<Tensor>& other);

}  // namespace monograph::ops
