// A second backend: dequantize for tensors of another device, registered beside the kernel of the
// CPU and on the same checks. What ops/cuda/ will be, with memory of the host in the place of a
// GPU's.
//
// The memory of this device cannot be read by the host: tests/python/ops/test_second_backend.py
// maps it without access, and only what runs "on the device" opens it. A check that reads data ends
// the process.
#include <sys/mman.h>

#include <memory>

#include "arguments/device.h"
#include "arguments/packed.h"
#include "monograph/base/float_types.h"
#include "monograph/kernels/dequantize/dequantize.h"

namespace monograph::ops {
namespace {

constexpr std::size_t kPage = 4096;  // each tensor of the device has pages of its own

class OnDevice {
 public:
  explicit OnDevice(const Tensor& tensor)
      : data_(tensor.mutable_data_ptr()),
        size_bytes_(static_cast<std::size_t>(tensor.numel() * tensor.element_size())) {
    allow(PROT_READ | PROT_WRITE);
  }
  ~OnDevice() { mprotect(data_, pages(), PROT_NONE); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  std::size_t pages() const { return ceil_div(size_bytes_, kPage) * kPage; }
  void allow(int access) const {
    STD_TORCH_CHECK(mprotect(data_, pages(), access) == 0, "second_backend: not its memory");
  }

  void* data_;
  std::size_t size_bytes_;
};

// One grid of a weight after another; each has an offset of its own.
void run_on_device(const PackedGrids& weight, DType type, std::byte* out) {
  const std::size_t grid_bytes = weight.first.elements() * size_bytes(type);
  for (std::size_t i = 0; i < weight.count; ++i) {
    PackedView grid = weight.grid(i);
    if (grid.scales.double_quantised()) grid.scales.offset = load_f32(grid.scales.offset_on_device);
    dequantize(grid, type, out + i * grid_bytes, serial_for);
  }
}

Tensor dequantize_second(const Tensor& values, const std::vector<Tensor>& scales,
                         const std::vector<std::int64_t>& layout, ScalarType dtype) {
  check_device("dequantize", DeviceType::PrivateUse1, {{"values", values}, {"scales", scales}});
  const PackedArgument weight =
      check_packed("dequantize", values, scales, read_layout("dequantize", layout));
  const DType type = dtype_of(dtype, "dequantize", "the output");
  Tensor out = empty("dequantize", values, weight.shape, dtype);
  const OnDevice written(out), read(values);
  std::vector<std::unique_ptr<OnDevice>> read_scales;
  for (const Tensor& scale : scales) read_scales.push_back(std::make_unique<OnDevice>(scale));
  run_on_device(weight.weight, type, static_cast<std::byte*>(out.mutable_data_ptr()));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, PrivateUse1, m) {
  m.impl("dequantize", TORCH_BOX(&dequantize_second));
}

}  // namespace monograph::ops
