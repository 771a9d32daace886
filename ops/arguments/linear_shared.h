// Arguments that linear_shared and linear_shared_dx take as lists: one entry per weight, or none.
#pragma once

#include "arguments/linear.h"

namespace monograph::ops {

// What linear_shared takes. `layouts` holds the layout of each weight (packed.h) and behind it the
// number of its scales; `scales` the scales of all weights in order. `a` is only checked.
struct LinearSharedArguments {
  std::vector<LinearWeight> weights;
  RowsArgument x;
  std::vector<RowsArgument> bias, u;
  std::vector<Tensor> b_owners;
  std::vector<LinearTerm> low_rank;  // u * b^T
};
LinearSharedArguments check_linear_shared(
    const char* op, const Tensor& x, const std::vector<Tensor>& values,
    const std::vector<Tensor>& scales, const std::vector<std::int64_t>& layouts,
    const std::vector<Tensor>& bias, const std::vector<Tensor>& u, const std::vector<Tensor>& b,
    const std::vector<Tensor>& a);

// What linear_shared_dx takes.
struct LinearSharedDxArguments {
  std::vector<RowsArgument> dy, du;
  std::vector<Tensor> a_owners;
  std::vector<LinearTerm> terms;  // dy * weight of each weight, then du * a of each
};
LinearSharedDxArguments check_linear_shared_dx(const char* op, const std::vector<Tensor>& dy,
                                               const std::vector<Tensor>& values,
                                               const std::vector<Tensor>& scales,
                                               const std::vector<std::int64_t>& layouts,
                                               const std::vector<Tensor>& du,
                                               const std::vector<Tensor>& a);

}  // namespace monograph::ops
