// monograph::dequantize and dequantize_out: a packed weight to bf16, fp16 or fp32.
#include "monograph/kernels/dequantize/dequantize.h"

#include "arguments/device.h"
#include "arguments/packed.h"

namespace monograph::ops {
namespace {

// An existing output this large has left the caches before anyone reads it. Stores past them save
// the read for ownership: 1.7x at 112 MiB, even at 32 MiB; on fresh pages, just zeroed in the
// cache, they would cost 1.3x, so the allocating op does not use them.
constexpr std::size_t kStreamingBytes = 32 << 20;

void dequantize_grids(const PackedGrids& weight, DType type, const Tensor& out, Stores stores) {
  auto* to = static_cast<std::byte*>(out.mutable_data_ptr());
  const std::size_t bytes = weight.first.elements() * size_bytes(type);
  for (std::size_t i = 0; i < weight.count; ++i)
    dequantize(weight.grid(i), type, to + i * bytes, torch_parallel_for, stores);
}

Tensor dequantize_cpu(const Tensor& values, const std::vector<Tensor>& scales,
                      const std::vector<std::int64_t>& layout, ScalarType dtype) {
  check_device("dequantize", DeviceType::CPU, {{"values", values}, {"scales", scales}});
  note_weight(values, scales);
  const PackedArgument weight =
      check_packed("dequantize", values, scales, read_layout("dequantize", layout));
  const DType type = dtype_of(dtype, "dequantize", "the output");
  Tensor out = empty("dequantize", values, weight.shape, dtype);
  dequantize_grids(weight.weight, type, out, Stores::kCached);
  return out;
}

void dequantize_out_cpu(const Tensor& values, const std::vector<Tensor>& scales,
                        const std::vector<std::int64_t>& layout, const Tensor& out) {
  check_device("dequantize_out", DeviceType::CPU,
               {{"values", values}, {"scales", scales}, {"out", out}});
  note_weight(values, scales);
  const PackedArgument weight =
      check_packed("dequantize_out", values, scales, read_layout("dequantize_out", layout));
  const DType type = check_output("dequantize_out", out, weight, values, scales);
  const bool large = static_cast<std::size_t>(out.numel()) * size_bytes(type) >= kStreamingBytes;
  dequantize_grids(weight.weight, type, out, large ? Stores::kStreaming : Stores::kCached);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("dequantize", TORCH_BOX(&dequantize_cpu));
  m.impl("dequantize_out", TORCH_BOX(&dequantize_out_cpu));
}

}  // namespace monograph::ops
