// monograph::seeded_dropout on the CPU: a mask by Philox, the GPU's words.
#include "monograph/kernels/seeded_dropout/seeded_dropout.h"

#include "arguments/device.h"

namespace monograph::ops {
namespace {

// `first`: the place of x[0] in the tensor that the mask is of.
Tensor dropped(const char* op, const Tensor& x, const Tensor& seed, std::int64_t stream,
               double probability, std::int64_t first) {
  check_given(op, "seed", seed);
  check_device(op, DeviceType::CPU, {{"x", x}, {"seed", seed}});
  STD_TORCH_CHECK(seed.scalar_type() == ScalarType::Long && seed.dim() == 0, op, ": seed is ",
                  name_of(seed.scalar_type()), " of ", seed.dim(),
                  " dimensions, wanted int64 of none");
  STD_TORCH_CHECK(probability >= 0 && probability < 1, op, ": probability is ", probability,
                  ", wanted 0 to below 1");
  STD_TORCH_CHECK(first >= 0, op, ": first is ", first, ", wanted 0 or more");
  const DType dtype = dtype_of(x.scalar_type(), op, "x");
  const Tensor in = torch::stable::contiguous(x);
  const std::vector<std::int64_t> shape(x.sizes().begin(), x.sizes().end());
  Tensor out = empty(op, x, shape, x.scalar_type());
  const auto number = *static_cast<const std::int64_t*>(seed.const_data_ptr());
  seeded_dropout(
      {dtype, in.const_data_ptr(), out.mutable_data_ptr(), static_cast<std::size_t>(in.numel()),
       static_cast<std::uint64_t>(first), static_cast<std::uint64_t>(number),
       static_cast<std::uint64_t>(stream), probability},
      torch_parallel_for);
  return out;
}

Tensor seeded_dropout_cpu(const Tensor& x, const Tensor& seed, std::int64_t stream,
                          double probability) {
  return dropped("seeded_dropout", x, seed, stream, probability, 0);
}

Tensor seeded_dropout_part_cpu(const Tensor& x, const Tensor& seed, std::int64_t stream,
                               double probability, std::int64_t first) {
  return dropped("seeded_dropout_part", x, seed, stream, probability, first);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("seeded_dropout", TORCH_BOX(&seeded_dropout_cpu));
  m.impl("seeded_dropout_part", TORCH_BOX(&seeded_dropout_part_cpu));
}

}  // namespace monograph::ops
