// linear and linear_dx by panels, on checked arguments. The low-rank part and the bias are computed
// first and rounded, and the large product is added to them before its own rounding.
#pragma once

#include "arguments/linear.h"
#include "cuda/panels.h"

namespace monograph::ops {

// x W^T + u b^T + bias; `a` of the arguments is not used.
Tensor linear_by_panels(const char* op, const PanelBackend& backend, const Tensor& x,
                        const PanelWeight& w, const std::optional<Tensor>& bias,
                        const std::optional<Tensor>& u, const std::optional<Tensor>& b);

// One of the products whose sum is dx: g W, or du a with a plain weight.
struct GradientTerm {
  Tensor g;
  LinearWeight weight;
  Tensor values;
};
// The sum in the order of the terms; each of them rounds it, so the largest belongs last.
Tensor linear_dx_by_panels(const char* op, const PanelBackend& backend,
                           const std::vector<GradientTerm>& terms);
// du a, as a term.
GradientTerm low_rank_term(const Tensor& du, const Tensor& a);

}  // namespace monograph::ops
