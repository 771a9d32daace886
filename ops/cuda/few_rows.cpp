#include "cuda/few_rows.h"

#include "cuda/products.h"
#include "monograph/gpu/crossover.h"

namespace monograph::ops {

bool takes_few_rows(int capability, const LinearWeight& weight, const RowsArgument& x) {
  return weight.packed.format != Format::kPlain &&
         x.matrix.rows <= gpu::fused_rows(capability, x.dtype);
}

Tensor linear_of_few_rows(const char* op, const FewRowsBackend& backend, const Tensor& x,
                          const LinearWeight& weight, const std::optional<Tensor>& bias,
                          const std::optional<Tensor>& u, const std::optional<Tensor>& b,
                          const std::optional<Tensor>& gain) {
  const RowsArgument rows = rows_of(op, "x", x);
  const std::size_t n = weight.packed.rows;
  Tensor y = empty_rows(op, x, n);
  // What the job points into lives until the kernel is queued: torch's allocator keeps the order of
  // the stream.
  std::optional<RowsArgument> low, added, factors;
  Tensor right;
  gpu::FewRows job = {.weight = weight.packed,
                      .dtype = rows.dtype,
                      .rows = rows.matrix.rows,
                      .x = rows.matrix.data,
                      .x_stride = rows.matrix.stride,
                      .y = y.mutable_data_ptr(),
                      .y_stride = n};
  if (u) {
    low = rows_of(op, "u", *u);
    right = torch::stable::contiguous(in_type(*b, x.scalar_type()));
    job.rank = low->matrix.cols;
    job.u = low->matrix.data;
    job.u_stride = low->matrix.stride;
    job.b = right.const_data_ptr();
  }
  if (bias) {
    added = vector_of(op, "bias", *bias, n, rows.dtype);
    job.bias = added->matrix.data;
  }
  if (gain) {
    factors = vector_of(op, "gain", *gain, n, DType::kFloat32);
    job.gain = static_cast<const float*>(factors->matrix.data);
  }
  if (y.numel() != 0) backend.linear(job, backend.stream);
  return y;
}

}  // namespace monograph::ops
