// The kernels of a vector vocabulary V for each storage type.
#pragma once

#include "monograph/kernels/varlen_attention/unit.h"
#include "monograph/kernels/varlen_attention/vector/backward.h"
#include "monograph/kernels/varlen_attention/vector/few_queries.h"
#include "monograph/kernels/varlen_attention/vector/forward.h"

namespace monograph {

template <class V, class T>
inline constexpr AttentionKernels kVectorKernels = {
    &VectorForward<V, T>::kKernel, &FewQueries<V, T>::kKernel, &VectorBackward<V, T>::kKernel};

template <class V>
const AttentionKernels* attention_kernels(DType dtype) {
  return with_type(
      dtype, []<class T>() __attribute__((always_inline)) { return &kVectorKernels<V, T>; });
}

}  // namespace monograph
