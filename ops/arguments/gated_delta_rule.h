// The arguments of gated_delta_rule and its backward, checked and turned into views.
#pragma once

#include <optional>

#include "arguments/varlen_attention.h"
#include "monograph/kernels/gated_delta_rule/gated_delta_rule.h"
#include "stable.h"

namespace monograph::ops {

// What forward and backward share; `state` is kept where it had to be copied.
struct DeltaRuleArguments {
  DeltaRuleProblem problem;
  HeadsArgument q, k, v;
  GateView g, beta;
  Tensor state;
};

DeltaRuleArguments check_delta_rule(const char* op, const Tensor& q, const Tensor& k,
                                    const Tensor& v, const Tensor& g, const Tensor& beta,
                                    const Tensor& cu, const std::optional<Tensor>& state,
                                    double scale, bool l2norm);

// float32 [documents, value heads, key size, value size], contiguous or copied.
Tensor states_of(const char* op, const char* what, const Tensor& tensor,
                 const DeltaRuleProblem& problem);

MutableGateView mutable_gates(const char* op, const Tensor& tensor);

}  // namespace monograph::ops
