// Launches of seeded_dropout.
#include "cuda/launching.cuh"
#include "monograph/kernels/seeded_dropout/gpu.cuh"

namespace monograph::gpu {

void launch_seeded_dropout(DType dtype, const void* x, std::size_t count, const std::int64_t* seed,
                           std::uint64_t stream_number, double probability, void* out,
                           Stream stream) {
  if (count == 0) return;
  const char* const name = "seeded_dropout";
  const unsigned blocks = grid_size(name, dropout_blocks(count));
  with_type(dtype, [&]<class T>() {
    const DropoutJob<T> job = {static_cast<const T*>(x),
                               static_cast<T*>(out),
                               count,
                               seed,
                               stream_number,
                               keep_below(probability),
                               static_cast<float>(1.0 - probability)};
    seeded_dropout_kernel<T><<<blocks, kDropoutThreads, 0, native(stream)>>>(job);
  });
  check_launch(name);
}

}  // namespace monograph::gpu
