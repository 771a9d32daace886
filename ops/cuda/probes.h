// Launches of core/monograph/gpu/probes.cuh; `dtype` is bf16 or fp16.
#pragma once

#include "cuda/launch.h"

namespace monograph::gpu {

void launch_probe_mma(DType dtype, const void* a, const void* b, const float* c, float* d,
                      Stream stream);
void launch_probe_pack(DType dtype, const float* x, std::size_t n, void* out, Stream stream);
void launch_probe_widen(DType dtype, const void* x, std::size_t n, float* out, Stream stream);
// '*', '+', '/', or 'f' for x * y + z; z is looked at there alone.
void launch_probe_arithmetic(char operation, const float* x, const float* y, const float* z,
                             std::size_t n, float* out, Stream stream);
void launch_probe_copy_async(const std::uint8_t* bytes, std::size_t n, std::size_t used,
                             std::uint8_t* out, Stream stream);
void launch_probe_shuffle_xor(const float* x, unsigned mask, float* out, Stream stream);

}  // namespace monograph::gpu
