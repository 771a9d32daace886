// monograph::rotary_frequencies and rotary_angles: what rotary positions turn by.
#include <cstring>
#include <tuple>

#include "arguments/device.h"
#include "arguments/linear.h"
#include "monograph/kernels/rotary/angles.h"

namespace monograph::ops {
namespace {

constexpr std::size_t kNumbers = 8;
constexpr std::int64_t kLargestSize = 1 << 16;

std::vector<double> rotary_frequencies_of(std::int64_t kind, std::int64_t size,
                                          const std::vector<double>& numbers) {
  const char* const op = "rotary_frequencies";
  STD_TORCH_CHECK(kind >= 0 && kind <= 3, op, ": kind is ", kind, ", wanted 0 to 3");
  STD_TORCH_CHECK(size >= 2 && size % 2 == 0 && size <= kLargestSize, op, ": size is ", size,
                  ", wanted an even number from 2 to ", kLargestSize);
  STD_TORCH_CHECK(numbers.size() == kNumbers, op, ": ", numbers.size(), " numbers, wanted ",
                  kNumbers);
  const double* const n = numbers.data();
  const RopeScaling scaling = {
      static_cast<RopeKind>(kind), n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7] != 0};
  const std::vector<float> found = rotary_frequencies(scaling, static_cast<std::size_t>(size));
  return {found.begin(), found.end()};
}

std::tuple<Tensor, Tensor> rotary_angles_cpu(const Tensor& positions, const Tensor& frequencies,
                                             double scaling, ScalarType dtype) {
  const char* const op = "rotary_angles";
  check_device(op, DeviceType::CPU, {{"positions", positions}, {"frequencies", frequencies}});
  check_given(op, "positions", positions);
  check_given(op, "frequencies", frequencies);
  STD_TORCH_CHECK(positions.scalar_type() == ScalarType::Long, op, ": positions is ",
                  name_of(positions.scalar_type()), ", wanted int64");
  STD_TORCH_CHECK(frequencies.scalar_type() == ScalarType::Float && frequencies.dim() == 1, op,
                  ": frequencies is ", name_of(frequencies.scalar_type()), " of ",
                  frequencies.dim(), " dimensions, wanted float32 of one");
  const DType type = dtype_of(dtype, op, "the output");
  const Tensor own = torch::stable::contiguous(positions);
  const Tensor turns = torch::stable::contiguous(frequencies);
  std::vector<std::int64_t> shape(positions.sizes().begin(), positions.sizes().end());
  shape.push_back(2 * frequencies.numel());
  Tensor cos = empty(op, positions, shape, dtype), sin = empty(op, positions, shape, dtype);
  rotary_angles(
      {type, static_cast<const std::int64_t*>(own.const_data_ptr()),
       static_cast<std::size_t>(own.numel()), static_cast<const float*>(turns.const_data_ptr()),
       static_cast<std::size_t>(turns.numel()), scaling, cos.mutable_data_ptr(),
       sin.mutable_data_ptr()},
      torch_parallel_for);
  return {cos, sin};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CompositeExplicitAutograd, m) {
  m.impl("rotary_frequencies", TORCH_BOX(&rotary_frequencies_of));
}
STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("rotary_angles", TORCH_BOX(&rotary_angles_cpu));
}

}  // namespace monograph::ops
