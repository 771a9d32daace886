// For linear_simt.cu and linear_mma.cu: the job of a launch in the type of its elements.
#pragma once

#include "cuda/launching.cuh"
#include "monograph/kernels/linear/gpu.cuh"

namespace monograph::gpu {

static_assert(kSimtRows == most_fused_rows(DType::kFloat32));
static_assert(kMmaRows == most_fused_rows(DType::kBFloat16) && kMmaRows == kFusedRows);

template <class T>
FewRowsJob<T> typed(const FewRows& job) {
  return {job.weight,
          static_cast<unsigned>(job.rows),
          static_cast<const T*>(job.x),
          job.x_stride,
          job.rank,
          static_cast<const T*>(job.u),
          job.u_stride,
          static_cast<const T*>(job.b),
          static_cast<const T*>(job.bias),
          job.gain,
          static_cast<T*>(job.y),
          job.y_stride};
}

void launch_linear_simt(const FewRows& job, Stream stream);  // to kSimtRows
void launch_linear_mma(const FewRows& job, Stream stream);   // to kMmaRows, of 16 bits

}  // namespace monograph::gpu
