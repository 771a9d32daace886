// The kernels of a vector vocabulary V for each storage type.
#pragma once

#include "monograph/kernels/varlen_attention/unit.h"
#include "monograph/kernels/varlen_attention/vector/backward.h"
#include "monograph/kernels/varlen_attention/vector/few_queries.h"
#include "monograph/kernels/varlen_attention/vector/forward.h"

namespace monograph {

template <class V, class T>
AttentionKernels vector_kernels() {
  return {&VectorForward<V, T>::kKernel, &FewQueries<V, T>::kKernel,
          &VectorBackward<V, T>::kKernel};
}

template <class V>
AttentionKernels attention_kernels(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return vector_kernels<V, Bf16>();
    case DType::kFloat16:
      return vector_kernels<V, Fp16>();
    case DType::kFloat32:
      break;
  }
  return vector_kernels<V, float>();
}

}  // namespace monograph
