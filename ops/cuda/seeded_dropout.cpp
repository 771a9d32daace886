// monograph::seeded_dropout for CUDA tensors.
#include "arguments/device.h"
#include "cuda/device.h"
#include "cuda/launch.h"

namespace monograph::ops {
namespace {

Tensor seeded_dropout_cuda(const Tensor& x, const Tensor& seed, std::int64_t stream,
                           double probability) {
  const char* const op = "seeded_dropout";
  check_given(op, "x", x);
  check_given(op, "seed", seed);
  STD_TORCH_CHECK(seed.scalar_type() == ScalarType::Long && seed.dim() == 0, op, ": seed is ",
                  name_of(seed.scalar_type()), " of ", seed.dim(),
                  " dimensions, wanted int64 of none");
  STD_TORCH_CHECK(probability >= 0 && probability < 1, op, ": probability is ", probability,
                  ", wanted 0 to below 1");
  const DType dtype = dtype_of(x.scalar_type(), op, "x");
  STD_TORCH_CHECK(!x.is_cpu(), op, ": x is on cpu and the seed is not, wanted both on one device");
  const CudaDevice device(x.get_device_index());
  // A graph would keep the number that the host holds now for all its replays.
  STD_TORCH_CHECK(!seed.is_cpu() || !device.captures(), op,
                  ": seed is on cpu while a graph is captured, wanted it on the device of x");
  const Tensor own = seed.is_cpu() ? torch::stable::to(seed, x.device()) : seed;
  check_device(op, DeviceType::CUDA, {{"x", x}, {"seed", own}});
  const Tensor in = torch::stable::contiguous(x);
  const std::vector<std::int64_t> shape(x.sizes().begin(), x.sizes().end());
  Tensor out = empty(op, x, shape, x.scalar_type());
  gpu::launch_seeded_dropout(dtype, in.const_data_ptr(), static_cast<std::size_t>(in.numel()),
                             static_cast<const std::int64_t*>(own.const_data_ptr()),
                             static_cast<std::uint64_t>(stream), probability,
                             out.mutable_data_ptr(), device.stream());
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CUDA, m) {
  m.impl("seeded_dropout", TORCH_BOX(&seeded_dropout_cuda));
}

}  // namespace monograph::ops
