// The kernels of a vector vocabulary V for each storage type.
#pragma once

#include "monograph/kernels/gated_delta_rule/vector/backward.h"
#include "monograph/kernels/gated_delta_rule/vector/few_tokens.h"
#include "monograph/kernels/gated_delta_rule/vector/forward.h"
#include "monograph/kernels/gated_delta_rule/vector/products.h"

namespace monograph {

template <class V, class T>
inline constexpr DeltaRuleKernels kDeltaRuleKernels = {
    DeltaForward<V, T, DeltaVectorProducts<V>>::bytes,
    DeltaForward<V, T, DeltaVectorProducts<V>>::run, DeltaFewTokens<V, T>::run,
    DeltaBackward<V, T, DeltaVectorProducts<V>>::bytes,
    DeltaBackward<V, T, DeltaVectorProducts<V>>::run};

template <class V>
const DeltaRuleKernels* delta_rule_kernels(DType dtype) {
  return with_type(
      dtype, []<class T>() __attribute__((always_inline)) { return &kDeltaRuleKernels<V, T>; });
}

}  // namespace monograph
