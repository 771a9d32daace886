// Double quantisation on a GPU: the bytes of double_quantize() of formats/dynamic_map.h.
#pragma once

#include "monograph/gpu/prims.h"
#include "monograph/kernels/quantize/gpu.cuh"

namespace monograph::gpu {

inline constexpr unsigned kGroupThreads = 256;
static_assert(kGroupThreads == kScaleGroup);

// A copy of dynamic_bounds(), passed with the launch.
struct DynamicBounds {
  float values[256];
};

struct SumShared {
  float scales[kGroupThreads];
};
// offset = the mean of all scales. One block: the sum is fp64 in the order of the scales, by one
// thread; the others bring them.
template <class = void>
MONOGRAPH_KERNEL(kGroupThreads)
mean_scale_kernel(const float* scales, std::size_t count, float* offset) {
  SumShared& shared = shared_memory<SumShared>();
  double sum = 0.0;
  for (std::size_t begin = 0; begin < count; begin += kGroupThreads) {
    const std::size_t i = begin + thread_index();
    if (i < count) write(&shared.scales[thread_index()], read(scales + i));
    sync_threads();
    if (thread_index() == 0)
      for (unsigned k = 0; k < kGroupThreads && begin + k < count; ++k)
        sum = add64(sum, static_cast<double>(read(&shared.scales[k])));
    sync_threads();
  }
  if (thread_index() == 0)
    write(offset, count == 0 ? 0.0f : static_cast<float>(div64(sum, static_cast<double>(count))));
}

struct GroupShared {
  std::uint32_t largest[kGroupThreads / kLanes];
};
// A block for each group of 256 scales.
template <class = void>
MONOGRAPH_KERNEL(kGroupThreads)
quantize_scales_kernel(const float* scales, std::size_t count, const float* offset,
                       DynamicBounds bounds, std::uint8_t* codes, float* groups) {
  GroupShared& shared = shared_memory<GroupShared>();
  const std::size_t i = std::size_t{block_index_x()} * kGroupThreads + thread_index();
  const float away = i < count ? sub(read(scales + i), read(offset)) : 0.0f;
  std::uint32_t bits = as_bits(away) & 0x7fffffffu;
  if (bits > kInfinity) bits = 0;  // a NaN is no maximum
  bits = largest_of_warp(bits);
  if (thread_index() % kLanes == 0) write(&shared.largest[thread_index() / kLanes], bits);
  sync_threads();
  for (unsigned k = 0; k < kGroupThreads / kLanes; ++k)
    bits = larger(bits, read(&shared.largest[k]));
  const float largest = as_float(bits);
  if (thread_index() == 0) write(groups + block_index_x(), largest);
  if (i >= count) return;
  const float x = mul(away, div(1.0f, largest < kLeastScale ? kLeastScale : largest));
  unsigned index = 0;
  for (unsigned width = 128; width != 0; width /= 2)
    if (x >= bounds.values[index + width - 1]) index += width;
  write(codes + i, static_cast<std::uint8_t>(index));
}

}  // namespace monograph::gpu
