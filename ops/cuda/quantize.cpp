// monograph::quantize for CUDA tensors. Where non-finite elements are an error, the host waits for
// the one number that tells; it saturates them without waiting.
#include "arguments/quantize.h"

#include <algorithm>

#include "arguments/device.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/products.h"
#include "monograph/formats/dynamic_map.h"

namespace monograph::ops {
namespace {

Tensor bytes_like(const Tensor& input, std::size_t size) {
  return empty("quantize", input, {static_cast<std::int64_t>(size)}, ScalarType::Byte);
}

template <class T>
T* data_of(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

std::vector<Tensor> double_quantized(const CudaDevice& device, const Tensor& input,
                                     const Tensor& scales, std::size_t blocks) {
  Tensor codes = bytes_like(input, blocks);
  Tensor groups = bytes_like(input, 4 * ceil_div(blocks, kScaleGroup));
  Tensor offset = bytes_like(input, sizeof(float));
  gpu::launch_double_quantize(data_of<const float>(scales), blocks, data_of<std::uint8_t>(codes),
                              data_of<float>(groups), data_of<float>(offset), device.stream());
  // Its memory is a constant of the library: nobody has to wait for the copy.
  const Tensor map = torch::stable::from_blob(
      const_cast<float*>(kDynamicMap), {static_cast<std::int64_t>(sizeof kDynamicMap)}, {1},
      torch::stable::Device(DeviceType::CPU), ScalarType::Byte);
  return {codes, groups, torch::stable::to(map, input.device(), /*non_blocking=*/true), offset};
}

// One pair of numbers a matrix, for the kernel; and what of it is stored.
struct MatrixScales {
  Tensor pairs, stored;
};
MatrixScales matrix_scales(const CudaDevice& device, const FormatInfo& info,
                           const MatrixShape& shape, const Tensor& input, const QuantizeJob& job) {
  const auto count = static_cast<std::int64_t>(shape.matrices);
  Tensor largest = torch::stable::new_zeros(input, {count}, ScalarType::Int);
  Tensor pairs = empty("quantize", input, {count, 2}, ScalarType::Float);
  static_assert(sizeof(TensorScales) == 2 * sizeof(float));
  gpu::launch_tensor_scales(job.rule, job.dtype, job.input, shape.rows * shape.cols, shape.matrices,
                            data_of<std::uint32_t>(largest), data_of<TensorScales>(pairs),
                            device.stream());
  const std::int64_t which = info.tensor_scale == TensorScale::kDivides ? 0 : 1;
  const Tensor column = torch::stable::contiguous(torch::stable::select(pairs, 1, which));
  return {pairs, as_bytes(column)};
}

void check_finite(const Tensor& first_bad) {
  const Tensor found = torch::stable::to(first_bad, torch::stable::Device(DeviceType::CPU));
  const std::int64_t bad = *static_cast<const std::int64_t*>(found.const_data_ptr());
  STD_TORCH_CHECK(bad == -1, "quantize: input is not finite at flat index ", bad,
                  "; nonfinite=\"saturate\" lets such values through");
}

// [values, *scales], flat; the scales as check_packed() wants them.
std::vector<Tensor> quantize_cuda(const Tensor& input, std::int64_t format, std::int64_t block,
                                  bool double_quant, bool saturate_nonfinite, std::int64_t rule,
                                  std::int64_t scale_bytes) {
  check_device("quantize", DeviceType::CUDA, {{"input", input}});
  auto [info, shape, job] =
      check_quantize(input, format, block, double_quant, saturate_nonfinite, rule, scale_bytes);
  STD_TORCH_CHECK(info.shape != BlockShape::kGroup, "quantize: no kernel for format ", info.name,
                  " on CUDA");
  const CudaDevice device(input.get_device_index());
  const std::size_t blocks = job.blocks();
  Tensor values = bytes_like(input, packed_bytes(info, job.elements));
  Tensor scales = bytes_like(input, size_bytes(job.kind) * blocks);
  job.values = data_of<std::uint8_t>(values);
  job.scales = data_of<std::uint8_t>(scales);
  std::vector<Tensor> result = {values, scales};
  MatrixScales matrices;
  if (info.tensor_scale != TensorScale::kNone) {
    matrices = matrix_scales(device, info, shape, input, job);
    result.push_back(matrices.stored);
    job.tensors = data_of<const TensorScales>(matrices.pairs);
    job.blocks_per_tensor =
        std::max<std::size_t>(blocks / std::max<std::size_t>(shape.matrices, 1), 1);
  }
  Tensor first_bad = empty("quantize", input, {1}, ScalarType::Long);
  torch::stable::fill_(first_bad, -1);
  gpu::launch_quantize(job, data_of<std::uint64_t>(first_bad), device.stream());
  if (!saturate_nonfinite) check_finite(first_bad);
  if (!double_quant) return result;
  result.pop_back();
  for (Tensor& part : double_quantized(device, input, scales, blocks)) result.push_back(part);
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CUDA, m) { m.impl("quantize", TORCH_BOX(&quantize_cuda)); }

}  // namespace monograph::ops
