// monograph_cuda::probe_*: one instruction of prims.h a call, for `monograph doctor --device cuda`.
#include "cuda/probes.h"

#include "arguments/device.h"
#include "cuda/device.h"

namespace monograph::ops {
namespace {

// Contiguous, of this type and this many elements; any number for -1.
void check_operand(const char* op, const char* what, const Tensor& tensor, ScalarType dtype,
                   std::int64_t count) {
  check_given(op, what, tensor);
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, op, ": ", what, " has dtype ",
                  name_of(tensor.scalar_type()), ", wanted ", name_of(dtype));
  STD_TORCH_CHECK(tensor.is_contiguous(), op, ": ", what, " is not contiguous");
  STD_TORCH_CHECK(count < 0 || tensor.numel() == count, op, ": ", what, " has ", tensor.numel(),
                  " elements, wanted ", count);
}

const float* floats(const Tensor& tensor) {
  return static_cast<const float*>(tensor.const_data_ptr());
}
float* floats_of(const Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); }

template <ScalarType kType>
Tensor probe_mma(const Tensor& a, const Tensor& b, const Tensor& c) {
  const char* const op = "probe_mma";
  check_device(op, DeviceType::CUDA, {{"a", a}, {"b", b}, {"c", c}});
  check_operand(op, "a", a, kType, 256);
  check_operand(op, "b", b, kType, 128);
  check_operand(op, "c", c, ScalarType::Float, 128);
  const CudaDevice device(a.get_device_index());
  Tensor d = empty(op, c, {16, 8}, ScalarType::Float);
  gpu::launch_probe_mma(dtype_of(kType, op, "a"), a.const_data_ptr(), b.const_data_ptr(), floats(c),
                        floats_of(d), device.stream());
  return d;
}

template <ScalarType kType>
Tensor probe_pack(const Tensor& x) {
  const char* const op = "probe_pack";
  check_device(op, DeviceType::CUDA, {{"x", x}});
  check_operand(op, "x", x, ScalarType::Float, -1);
  STD_TORCH_CHECK(x.numel() % 2 == 0, op, ": x has ", x.numel(),
                  " elements, wanted an even number");
  const CudaDevice device(x.get_device_index());
  Tensor out = empty(op, x, {x.numel()}, kType);
  gpu::launch_probe_pack(dtype_of(kType, op, "x"), floats(x), static_cast<std::size_t>(x.numel()),
                         out.mutable_data_ptr(), device.stream());
  return out;
}

template <ScalarType kType>
Tensor probe_widen(const Tensor& x) {
  const char* const op = "probe_widen";
  check_device(op, DeviceType::CUDA, {{"x", x}});
  check_operand(op, "x", x, kType, -1);
  const CudaDevice device(x.get_device_index());
  Tensor out = empty(op, x, {x.numel()}, ScalarType::Float);
  gpu::launch_probe_widen(dtype_of(kType, op, "x"), x.const_data_ptr(),
                          static_cast<std::size_t>(x.numel()), floats_of(out), device.stream());
  return out;
}

Tensor arithmetic(const char* op, char operation, const Tensor& x, const Tensor& y,
                  const Tensor& z) {
  check_device(op, DeviceType::CUDA, {{"x", x}, {"y", y}, {"z", z}});
  check_operand(op, "x", x, ScalarType::Float, -1);
  check_operand(op, "y", y, ScalarType::Float, x.numel());
  check_operand(op, "z", z, ScalarType::Float, x.numel());
  const CudaDevice device(x.get_device_index());
  Tensor out = empty(op, x, {x.numel()}, ScalarType::Float);
  gpu::launch_probe_arithmetic(operation, floats(x), floats(y), floats(z),
                               static_cast<std::size_t>(x.numel()), floats_of(out),
                               device.stream());
  return out;
}

Tensor probe_mul_rn(const Tensor& x, const Tensor& y) {
  return arithmetic("probe_mul_rn", '*', x, y, y);
}
Tensor probe_add_rn(const Tensor& x, const Tensor& y) {
  return arithmetic("probe_add_rn", '+', x, y, y);
}
Tensor probe_div_rn(const Tensor& x, const Tensor& y) {
  return arithmetic("probe_div_rn", '/', x, y, y);
}
Tensor probe_fma_rn(const Tensor& x, const Tensor& y, const Tensor& z) {
  return arithmetic("probe_fma_rn", 'f', x, y, z);
}

Tensor probe_copy_async(const Tensor& bytes, std::int64_t used) {
  const char* const op = "probe_copy_async";
  check_device(op, DeviceType::CUDA, {{"bytes", bytes}});
  check_operand(op, "bytes", bytes, ScalarType::Byte, -1);
  STD_TORCH_CHECK(bytes.numel() % 16 == 0, op, ": bytes has ", bytes.numel(),
                  " elements, wanted a multiple of 16");
  STD_TORCH_CHECK(used >= 0 && used % 16 == 0, op, ": used is ", used, ", wanted a multiple of 16");
  STD_TORCH_CHECK(reinterpret_cast<std::uintptr_t>(bytes.const_data_ptr()) % 16 == 0, op,
                  ": bytes is not aligned to 16");
  const CudaDevice device(bytes.get_device_index());
  Tensor out = empty(op, bytes, {bytes.numel()}, ScalarType::Byte);
  gpu::launch_probe_copy_async(static_cast<const std::uint8_t*>(bytes.const_data_ptr()),
                               static_cast<std::size_t>(bytes.numel()),
                               static_cast<std::size_t>(used),
                               static_cast<std::uint8_t*>(out.mutable_data_ptr()), device.stream());
  return out;
}

Tensor probe_shuffle_xor(const Tensor& x, std::int64_t mask) {
  const char* const op = "probe_shuffle_xor";
  check_device(op, DeviceType::CUDA, {{"x", x}});
  check_operand(op, "x", x, ScalarType::Float, 32);
  STD_TORCH_CHECK(mask >= 0 && mask < 32, op, ": mask is ", mask, ", wanted 0 to 31");
  const CudaDevice device(x.get_device_index());
  Tensor out = empty(op, x, {32}, ScalarType::Float);
  gpu::launch_probe_shuffle_xor(floats(x), static_cast<unsigned>(mask), floats_of(out),
                                device.stream());
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(monograph_cuda, m) {
  m.def("probe_mma_bf16(Tensor a, Tensor b, Tensor c) -> Tensor");
  m.def("probe_mma_fp16(Tensor a, Tensor b, Tensor c) -> Tensor");
  m.def("probe_pack_bf16(Tensor x) -> Tensor");
  m.def("probe_pack_fp16(Tensor x) -> Tensor");
  m.def("probe_widen_bf16(Tensor x) -> Tensor");
  m.def("probe_widen_fp16(Tensor x) -> Tensor");
  m.def("probe_mul_rn(Tensor x, Tensor y) -> Tensor");
  m.def("probe_add_rn(Tensor x, Tensor y) -> Tensor");
  m.def("probe_div_rn(Tensor x, Tensor y) -> Tensor");
  m.def("probe_fma_rn(Tensor x, Tensor y, Tensor z) -> Tensor");
  m.def("probe_copy_async(Tensor bytes, int used) -> Tensor");
  m.def("probe_shuffle_xor(Tensor x, int mask) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(monograph_cuda, CUDA, m) {
  m.impl("probe_mma_bf16", TORCH_BOX(&probe_mma<ScalarType::BFloat16>));
  m.impl("probe_mma_fp16", TORCH_BOX(&probe_mma<ScalarType::Half>));
  m.impl("probe_pack_bf16", TORCH_BOX(&probe_pack<ScalarType::BFloat16>));
  m.impl("probe_pack_fp16", TORCH_BOX(&probe_pack<ScalarType::Half>));
  m.impl("probe_widen_bf16", TORCH_BOX(&probe_widen<ScalarType::BFloat16>));
  m.impl("probe_widen_fp16", TORCH_BOX(&probe_widen<ScalarType::Half>));
  m.impl("probe_mul_rn", TORCH_BOX(&probe_mul_rn));
  m.impl("probe_add_rn", TORCH_BOX(&probe_add_rn));
  m.impl("probe_div_rn", TORCH_BOX(&probe_div_rn));
  m.impl("probe_fma_rn", TORCH_BOX(&probe_fma_rn));
  m.impl("probe_copy_async", TORCH_BOX(&probe_copy_async));
  m.impl("probe_shuffle_xor", TORCH_BOX(&probe_shuffle_xor));
}

}  // namespace monograph::ops
