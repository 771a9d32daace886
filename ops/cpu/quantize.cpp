// monograph::quantize: bf16, fp16 or fp32 to packed values and scales.
#include "monograph/kernels/quantize/quantize.h"

#include <algorithm>
#include <cstring>

#include "arguments/device.h"
#include "arguments/quantize.h"
#include "monograph/formats/dynamic_map.h"
#include "monograph/formats/zero_points.h"

namespace monograph::ops {
namespace {

Tensor bytes_like(const Tensor& input, std::size_t size) {
  return empty("quantize", input, {static_cast<std::int64_t>(size)}, ScalarType::Byte);
}

std::vector<Tensor> double_quantized(const Tensor& input, const float* scales, std::size_t blocks) {
  Tensor codes = bytes_like(input, blocks);
  Tensor groups = bytes_like(input, 4 * ceil_div(blocks, kScaleGroup));
  Tensor map = bytes_like(input, sizeof kDynamicMap);
  Tensor offset = bytes_like(input, sizeof(float));
  // Fresh tensors are aligned to 64 bytes.
  double_quantize(scales, blocks, static_cast<std::uint8_t*>(codes.mutable_data_ptr()),
                  static_cast<float*>(groups.mutable_data_ptr()),
                  static_cast<float*>(offset.mutable_data_ptr()), torch_parallel_for);
  std::memcpy(map.mutable_data_ptr(), kDynamicMap, sizeof kDynamicMap);
  return {codes, groups, map, offset};
}

// One number per matrix, as it is stored; fills `tensors` in both directions.
Tensor tensor_scales(const FormatInfo& info, const MatrixShape& shape, const Tensor& input,
                     const QuantizeJob& job, std::vector<TensorScales>& tensors) {
  const std::size_t count = shape.rows * shape.cols;
  Tensor stored = bytes_like(input, 4 * shape.matrices);
  float* out = static_cast<float*>(stored.mutable_data_ptr());
  for (std::size_t i = 0; i < shape.matrices; ++i) {
    const void* in = static_cast<const std::byte*>(job.input) + i * count * size_bytes(job.dtype);
    tensors.push_back(
        choose_tensor_scales(job.format, job.rule, job.dtype, in, count, torch_parallel_for));
    out[i] = info.tensor_scale == TensorScale::kDivides ? tensors[i].encode : tensors[i].decode;
  }
  return stored;
}

// [values, *scales], flat; the scales as check_packed() wants them.
std::vector<Tensor> quantize_cpu(const Tensor& input, std::int64_t format, std::int64_t block,
                                 bool double_quant, bool saturate_nonfinite, std::int64_t rule,
                                 std::int64_t scale_bytes) {
  check_device("quantize", DeviceType::CPU, {{"input", input}});
  auto [info, shape, job] =
      check_quantize(input, format, block, double_quant, saturate_nonfinite, rule, scale_bytes);
  const std::size_t blocks = job.blocks();
  Tensor values = bytes_like(input, packed_bytes(info, shape.rows * shape.matrices, shape.cols));
  Tensor scales = bytes_like(input, size_bytes(job.kind) * blocks);
  job.values = static_cast<std::uint8_t*>(values.mutable_data_ptr());
  job.scales = static_cast<std::uint8_t*>(scales.mutable_data_ptr());
  std::vector<Tensor> result = {values, scales};
  std::vector<TensorScales> tensors;
  if (info.tensor_scale != TensorScale::kNone) {
    result.push_back(tensor_scales(info, shape, input, job, tensors));
    job.tensors = tensors.data();
    job.blocks_per_tensor =
        std::max<std::size_t>(blocks / std::max<std::size_t>(shape.matrices, 1), 1);
  }
  std::vector<std::uint8_t> zeros(job.rule == ScaleRule::kMinMax ? blocks : 0);
  if (!zeros.empty()) job.zeros = zeros.data();
  const auto bad = quantize(job, torch_parallel_for);
  STD_TORCH_CHECK(!bad, "quantize: input is not finite at flat index ", bad.value_or(0),
                  "; nonfinite=\"saturate\" lets such values through");
  if (job.rule == ScaleRule::kMinMax) {
    const std::size_t groups = shape.cols / job.block;
    result.push_back(bytes_like(input, zero_point_bytes(info, shape.rows, groups)));
    store_zero_points(info, shape.rows, groups, zeros.data(),
                      static_cast<std::uint8_t*>(result.back().mutable_data_ptr()));
  }
  if (!double_quant) return result;
  // Fresh tensors are aligned to 64 bytes.
  result.pop_back();
  for (Tensor& part :
       double_quantized(input, static_cast<const float*>(scales.const_data_ptr()), blocks))
    result.push_back(part);
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) { m.impl("quantize", TORCH_BOX(&quantize_cpu)); }

}  // namespace monograph::ops
