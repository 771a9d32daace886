// Launches of linear for up to 8 rows.
#include "cuda/linear_job.cuh"

namespace monograph::gpu {
namespace {

template <class F, class T, unsigned kRows>
void run(const FewRows& job, Stream stream) {
  const unsigned blocks = grid_size("linear", linear_simt_blocks(job.weight.rows));
  linear_simt_kernel<F, T, kRows><<<blocks, kSimtThreads, 0, native(stream)>>>(typed<T>(job));
}

}  // namespace

void launch_linear_simt(const FewRows& job, Stream stream) {
  by_format("linear", job.weight.format, [&]<class F>() {
    with_type(job.dtype, [&]<class T>() {
      if (job.rows == 1)
        run<F, T, 1>(job, stream);
      else if (job.rows == 2)
        run<F, T, 2>(job, stream);
      else if (job.rows <= 4)
        run<F, T, 4>(job, stream);
      else
        run<F, T, 8>(job, stream);
    });
  });
  check_launch("linear");
}

void launch_linear(const FewRows& job, Stream stream) {
  if (job.rows == 0 || job.weight.rows == 0) return;
  if (job.rows > most_fused_rows(job.dtype))
    throw Error("linear: " + std::to_string(job.rows) + " rows of " + name_of(job.dtype) +
                ", a kernel takes at most " + std::to_string(most_fused_rows(job.dtype)));
  if (job.rows <= kSimtRows)
    launch_linear_simt(job, stream);
  else
    launch_linear_mma(job, stream);
}

}  // namespace monograph::gpu
