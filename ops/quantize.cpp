// monograph::quantize: bf16, fp16 or fp32 to packed values and scales.
#include "kernels/quantize/quantize.h"

#include <cstring>

#include "formats/dynamic_map.h"
#include "formats/packed_view.h"
#include "stable.h"

namespace monograph::ops {
namespace {

Tensor bytes_like(const Tensor& input, std::size_t size) {
  return torch::stable::new_empty(input, {static_cast<std::int64_t>(size)}, ScalarType::Byte);
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

// [values, *scales], flat; the scales as check_packed() wants them.
std::vector<Tensor> quantize_cpu(const Tensor& input, std::int64_t format, std::int64_t block,
                                 bool double_quant, bool saturate_nonfinite) {
  const FormatInfo* info = find_format(static_cast<Format>(format));
  STD_TORCH_CHECK(format > 0 && format < 256 && info != nullptr, "quantize: format is ", format,
                  ", not the number of a packed format");
  STD_TORCH_CHECK(block > 0 && block_fits(*info, static_cast<std::size_t>(block)),
                  "quantize: block size is ", block, ", format ", info->name,
                  " wants a power of two from ", info->smallest_block, " to ", info->largest_block);
  STD_TORCH_CHECK(input.is_contiguous(), "quantize: input is not contiguous");
  QuantizeJob job = {};
  job.format = info->format;
  job.dtype = dtype_of(input.scalar_type(), "quantize", "input");
  job.input = input.const_data_ptr();
  job.elements = static_cast<std::size_t>(input.numel());
  job.block = static_cast<std::size_t>(block);
  job.nonfinite = saturate_nonfinite ? NonFinite::kSaturate : NonFinite::kError;
  const std::size_t blocks = ceil_div(job.elements, job.block);
  Tensor values = bytes_like(input, packed_bytes(*info, job.elements));
  Tensor absmax = bytes_like(input, 4 * blocks);
  job.values = static_cast<std::uint8_t*>(values.mutable_data_ptr());
  job.scales = static_cast<float*>(absmax.mutable_data_ptr());
  const auto bad = quantize(job, torch_parallel_for);
  STD_TORCH_CHECK(!bad, "quantize: input is not finite at flat index ", bad.value_or(0),
                  "; nonfinite=\"saturate\" lets such values through");
  std::vector<Tensor> result = {values};
  if (double_quant) {
    for (Tensor& scale : double_quantized(input, job.scales, blocks)) result.push_back(scale);
  } else {
    result.push_back(absmax);
  }
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(monograph, m) {
  m.def(
      "quantize(Tensor input, int format, int block, bool double_quant, bool saturate_nonfinite) "
      "-> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) { m.impl("quantize", TORCH_BOX(&quantize_cpu)); }

}  // namespace monograph::ops
