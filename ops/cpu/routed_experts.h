// What the operators on layers of experts share: devices, read-ahead and tensors for gradients.
#pragma once

#include <initializer_list>
#include <optional>
#include <vector>

#include "arguments/device.h"
#include "arguments/experts.h"

namespace monograph::ops {

void check_experts_devices(const char* op, const ExpertsWeight& first, const ExpertsWeight& second,
                           std::initializer_list<NamedTensors> rows);

// Tells read-ahead which slices of the stacks are used.
void note_routed(const ExpertsWeight& first, const ExpertsWeight& second,
                 const ExpertsProblem& problem);

// A tensor for each gradient that `need` wants (x, weights, biases, pairs of factors), empty ones
// for the others. dx has `dx_rows` rows.
struct ExpertsGradientTensors {
  Tensor dx, dweights, dbias1, dbias2, da1, db1, da2, db2;
  ExpertsGradients views;
};
ExpertsGradientTensors make_gradients(const char* op, const Tensor& x, std::int64_t dx_rows,
                                      const Tensor& weights, const ExpertsWeight& first,
                                      const ExpertsWeight& second, const std::vector<bool>& need);

}  // namespace monograph::ops
