#include "arguments/head.h"

namespace monograph::ops {

HeadArguments check_head(const char* op, const Tensor& x, const Tensor& values,
                         const std::vector<Tensor>& scales, const std::vector<std::int64_t>& layout,
                         const std::optional<Tensor>& bias, const Tensor& labels, double softcap,
                         double scale) {
  HeadArguments a = {rows_of(op, "x", x), {}, {}, {}};
  const LinearWeight weight = check_weight(op, values, scales, layout);
  STD_TORCH_CHECK(a.x.matrix.cols == weight.packed.cols, op, ": x has ", a.x.matrix.cols,
                  " columns, the weight has ", weight.packed.cols);
  check_given(op, "labels", labels);
  STD_TORCH_CHECK(labels.scalar_type() == ScalarType::Long, op, ": labels has dtype ",
                  name_of(labels.scalar_type()), ", wanted int64");
  STD_TORCH_CHECK(static_cast<std::size_t>(labels.numel()) == a.x.matrix.rows, op, ": labels has ",
                  labels.numel(), " entries, x has ", a.x.matrix.rows, " rows");
  STD_TORCH_CHECK(softcap >= 0, op, ": softcap is ", softcap, ", wanted 0 for none or more");
  STD_TORCH_CHECK(scale > 0, op, ": scale is ", scale, ", wanted more than 0");
  a.labels = torch::stable::contiguous(labels);
  if (bias) a.bias = vector_of(op, "bias", *bias, weight.packed.rows, a.x.dtype);
  a.problem = {a.x.dtype,
               a.x.matrix,
               weight,
               a.bias ? a.bias->matrix.data : nullptr,
               static_cast<const std::int64_t*>(a.labels.const_data_ptr()),
               {float32_of(op, "scale", scale), float32_of(op, "softcap", softcap)}};
  return a;
}

Tensor float_vector(const Tensor& like, std::size_t count) {
  return torch::stable::new_empty(like, {static_cast<std::int64_t>(count)}, ScalarType::Float);
}

}  // namespace monograph::ops
