// Launches of the rows of the loss.
#include "cuda/launching.cuh"
#include "monograph/kernels/linear_cross_entropy/gpu.cuh"

namespace monograph::gpu {

void launch_loss_rows(const LossPanel& panel, Stream stream) {
  if (panel.rows == 0) return;
  const char* const name = "linear_cross_entropy";
  const unsigned blocks = grid_size(name, panel.rows);
  const LossRows out = {panel.loss, panel.lse, panel.entropy, panel.log_sum_squares,
                        panel.mean, panel.top};
  with_type(panel.dtype, [&]<class T>() {
    const LogitsPanel<T> logits = {static_cast<T*>(panel.logits), panel.stride, panel.count,
                                   panel.map, panel.labels};
    loss_rows_kernel<T><<<blocks, kLossThreads, 0, native(stream)>>>(logits, out, panel.gradient);
  });
  check_launch(name);
}

}  // namespace monograph::gpu
