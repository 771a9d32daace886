// monograph::seeded_dropout on the CPU: a mask by Philox, the GPU's words.
#include "monograph/kernels/seeded_dropout/seeded_dropout.h"

#include "arguments/device.h"

namespace monograph::ops {
namespace {

Tensor seeded_dropout_cpu(const Tensor& x, const Tensor& seed, std::int64_t stream,
                          double probability) {
  const char* const op = "seeded_dropout";
  check_given(op, "seed", seed);
  check_device(op, DeviceType::CPU, {{"x", x}, {"seed", seed}});
  STD_TORCH_CHECK(seed.scalar_type() == ScalarType::Long && seed.dim() == 0, op, ": seed is ",
                  name_of(seed.scalar_type()), " of ", seed.dim(),
                  " dimensions, wanted int64 of none");
  STD_TORCH_CHECK(probability >= 0 && probability < 1, op, ": probability is ", probability,
                  ", wanted 0 to below 1");
  const DType dtype = dtype_of(x.scalar_type(), op, "x");
  const Tensor in = torch::stable::contiguous(x);
  const std::vector<std::int64_t> shape(x.sizes().begin(), x.sizes().end());
  Tensor out = empty(op, x, shape, x.scalar_type());
  const auto number = *static_cast<const std::int64_t*>(seed.const_data_ptr());
  seeded_dropout(
      {dtype, in.const_data_ptr(), out.mutable_data_ptr(), static_cast<std::size_t>(in.numel()), 0,
       static_cast<std::uint64_t>(number), static_cast<std::uint64_t>(stream), probability},
      torch_parallel_for);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("seeded_dropout", TORCH_BOX(&seeded_dropout_cpu));
}

}  // namespace monograph::ops
