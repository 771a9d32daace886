// monograph::silu_mul, gelu_mul and their backwards: the middle of a gated MLP.
#include "monograph/kernels/gated_activation/gated_activation.h"

#include <tuple>

#include "arguments/device.h"
#include "arguments/linear.h"

namespace monograph::ops {
namespace {

Tensor empty_like(const char* op, const Tensor& gate) {
  return empty(op, gate, {gate.sizes().begin(), gate.sizes().end()}, gate.scalar_type());
}

Tensor forward(const char* op, const Tensor& gate, const Tensor& up, Activation activation) {
  check_device(op, DeviceType::CPU, {{"gate", gate}, {"up", up}});
  const RowsArgument left = rows_of(op, "gate", gate);
  const RowsArgument right = rows_like(op, "up", up, gate, left, left.dtype);
  Tensor y = empty_like(op, gate);
  gated_activation(
      {left.dtype, activation, left.matrix.rows, left.matrix.cols, left.matrix.data,
       right.matrix.data, left.matrix.stride, right.matrix.stride, y.mutable_data_ptr()},
      torch_parallel_for);
  return y;
}

std::tuple<Tensor, Tensor> backward(const char* op, const Tensor& dy, const Tensor& gate,
                                    const Tensor& up, Activation activation) {
  check_device(op, DeviceType::CPU, {{"dy", dy}, {"gate", gate}, {"up", up}});
  const RowsArgument left = rows_of(op, "gate", gate);
  const RowsArgument right = rows_like(op, "up", up, gate, left, left.dtype);
  const RowsArgument given = rows_like(op, "dy", dy, gate, left, left.dtype);
  Tensor dgate = empty_like(op, gate), dup = empty_like(op, gate);
  gated_activation_backward(
      {left.dtype, activation, left.matrix.rows, left.matrix.cols, given.matrix.data,
       left.matrix.data, right.matrix.data, given.matrix.stride, left.matrix.stride,
       right.matrix.stride, dgate.mutable_data_ptr(), dup.mutable_data_ptr()},
      torch_parallel_for);
  return {dgate, dup};
}

Activation gelu_of(bool tanh) { return tanh ? Activation::kGeluTanh : Activation::kGelu; }

Tensor silu_mul_cpu(const Tensor& gate, const Tensor& up) {
  return forward("silu_mul", gate, up, Activation::kSilu);
}
Tensor gelu_mul_cpu(const Tensor& gate, const Tensor& up, bool tanh) {
  return forward("gelu_mul", gate, up, gelu_of(tanh));
}
std::tuple<Tensor, Tensor> silu_mul_backward_cpu(const Tensor& dy, const Tensor& gate,
                                                 const Tensor& up) {
  return backward("silu_mul_backward", dy, gate, up, Activation::kSilu);
}
std::tuple<Tensor, Tensor> gelu_mul_backward_cpu(const Tensor& dy, const Tensor& gate,
                                                 const Tensor& up, bool tanh) {
  return backward("gelu_mul_backward", dy, gate, up, gelu_of(tanh));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("silu_mul", TORCH_BOX(&silu_mul_cpu));
  m.impl("silu_mul_backward", TORCH_BOX(&silu_mul_backward_cpu));
  m.impl("gelu_mul", TORCH_BOX(&gelu_mul_cpu));
  m.impl("gelu_mul_backward", TORCH_BOX(&gelu_mul_backward_cpu));
}

}  // namespace monograph::ops
