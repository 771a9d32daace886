// Launches of linear for up to 64 rows of 16-bit elements.
#include "cuda/linear_job.cuh"

namespace monograph::gpu {
namespace {

template <class F, class T>
void run(const FewRows& job, Stream stream) {
  const unsigned blocks = grid_size("linear", linear_mma_blocks(job.weight.rows));
  const FewRowsJob<T> own = typed<T>(job);
  if (job.rows <= 16)
    linear_mma_kernel<F, T, 1><<<blocks, kMmaThreads, 0, native(stream)>>>(own);
  else if (job.rows <= 32)
    linear_mma_kernel<F, T, 2><<<blocks, kMmaThreads, 0, native(stream)>>>(own);
  else
    linear_mma_kernel<F, T, 4><<<blocks, kMmaThreads, 0, native(stream)>>>(own);
}

}  // namespace

void launch_linear_mma(const FewRows& job, Stream stream) {
  by_format("linear", job.weight.format, [&]<class F>() {
    if (job.dtype == DType::kBFloat16)
      run<F, Bf16>(job, stream);
    else
      run<F, Fp16>(job, stream);
  });
  check_launch("linear");
}

}  // namespace monograph::gpu
