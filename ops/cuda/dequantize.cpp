// monograph::dequantize and dequantize_out for CUDA tensors.
#include "arguments/device.h"
#include "arguments/packed.h"
#include "cuda/device.h"
#include "cuda/launch.h"

namespace monograph::ops {
namespace {

void dequantize_grids(const PackedGrids& weight, DType type, const Tensor& out) {
  const CudaDevice device(out.get_device_index());
  auto* to = static_cast<std::byte*>(out.mutable_data_ptr());
  const std::size_t bytes = weight.first.elements() * size_bytes(type);
  for (std::size_t i = 0; i < weight.count; ++i)
    gpu::launch_dequantize(weight.grid(i), type, to + i * bytes, device.stream());
}

Tensor dequantize_cuda(const Tensor& values, const std::vector<Tensor>& scales,
                       const std::vector<std::int64_t>& layout, ScalarType dtype) {
  check_device("dequantize", DeviceType::CUDA, {{"values", values}, {"scales", scales}});
  const PackedArgument weight =
      check_packed("dequantize", values, scales, read_layout("dequantize", layout));
  const DType type = dtype_of(dtype, "dequantize", "the output");
  Tensor out = empty("dequantize", values, weight.shape, dtype);
  dequantize_grids(weight.weight, type, out);
  return out;
}

void dequantize_out_cuda(const Tensor& values, const std::vector<Tensor>& scales,
                         const std::vector<std::int64_t>& layout, const Tensor& out) {
  check_device("dequantize_out", DeviceType::CUDA,
               {{"values", values}, {"scales", scales}, {"out", out}});
  const PackedArgument weight =
      check_packed("dequantize_out", values, scales, read_layout("dequantize_out", layout));
  const DType type = check_output("dequantize_out", out, weight, values, scales);
  dequantize_grids(weight.weight, type, out);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CUDA, m) {
  m.impl("dequantize", TORCH_BOX(&dequantize_cuda));
  m.impl("dequantize_out", TORCH_BOX(&dequantize_out_cuda));
}

}  // namespace monograph::ops
