// Launches of the probes.
#include "cuda/launching.cuh"
#include "cuda/probes.h"
#include "monograph/gpu/probes.cuh"

namespace monograph::gpu {
namespace {

unsigned warps(std::size_t threads) { return grid_size("probe", ceil_div(threads, kProbeThreads)); }

template <ProbeArithmetic kOperation>
void launch_arithmetic(const float* x, const float* y, const float* z, std::size_t n, float* out,
                       Stream stream) {
  probe_arithmetic_kernel<kOperation>
      <<<warps(n), kProbeThreads, 0, native(stream)>>>(x, y, z, n, out);
}

// Calls run.operator()<T>() for one of the two types of 16 bits.
template <class Run>
void by_narrow_type(DType dtype, const Run& run) {
  if (dtype == DType::kBFloat16)
    run.template operator()<Bf16>();
  else
    run.template operator()<Fp16>();
}

}  // namespace

void launch_probe_mma(DType dtype, const void* a, const void* b, const float* c, float* d,
                      Stream stream) {
  by_narrow_type(dtype, [&]<class T>() {
    probe_mma_kernel<T><<<1, kProbeThreads, 0, native(stream)>>>(static_cast<const T*>(a),
                                                                 static_cast<const T*>(b), c, d);
  });
  check_launch("probe_mma");
}

void launch_probe_pack(DType dtype, const float* x, std::size_t n, void* out, Stream stream) {
  if (n == 0) return;
  by_narrow_type(dtype, [&]<class T>() {
    probe_pack_kernel<T>
        <<<warps(n / 2), kProbeThreads, 0, native(stream)>>>(x, n, static_cast<T*>(out));
  });
  check_launch("probe_pack");
}

void launch_probe_widen(DType dtype, const void* x, std::size_t n, float* out, Stream stream) {
  if (n == 0) return;
  by_narrow_type(dtype, [&]<class T>() {
    probe_widen_kernel<T>
        <<<warps(n), kProbeThreads, 0, native(stream)>>>(static_cast<const T*>(x), n, out);
  });
  check_launch("probe_widen");
}

void launch_probe_arithmetic(char operation, const float* x, const float* y, const float* z,
                             std::size_t n, float* out, Stream stream) {
  if (n == 0) return;
  switch (operation) {
    case '*':
      launch_arithmetic<ProbeArithmetic::kMul>(x, y, z, n, out, stream);
      break;
    case '+':
      launch_arithmetic<ProbeArithmetic::kAdd>(x, y, z, n, out, stream);
      break;
    case '/':
      launch_arithmetic<ProbeArithmetic::kDiv>(x, y, z, n, out, stream);
      break;
    default:
      launch_arithmetic<ProbeArithmetic::kFma>(x, y, z, n, out, stream);
      break;
  }
  check_launch("probe_arithmetic");
}

void launch_probe_copy_async(const std::uint8_t* bytes, std::size_t n, std::size_t used,
                             std::uint8_t* out, Stream stream) {
  if (n == 0) return;
  probe_copy_async_kernel<<<warps(n / 16), kProbeThreads, 0, native(stream)>>>(bytes, n, used, out);
  check_launch("probe_copy_async");
}

void launch_probe_shuffle_xor(const float* x, unsigned mask, float* out, Stream stream) {
  probe_shuffle_xor_kernel<<<1, kProbeThreads, 0, native(stream)>>>(x, mask, out);
  check_launch("probe_shuffle_xor");
}

}  // namespace monograph::gpu
