// One instruction of prims.h a kernel, so that a card's owner can see each of them alone
// (`monograph doctor --device cuda`).
#pragma once

#include "monograph/gpu/prims.h"

namespace monograph::gpu {

inline constexpr unsigned kProbeThreads = 32;  // a warp

// d[16, 8] = c + a[16, 16] b[16, 8], all row-major; one block. T is Bf16 or Fp16.
template <class T>
MONOGRAPH_KERNEL(kProbeThreads)
probe_mma_kernel(const T* a, const T* b, const float* c, float* d) {
  const unsigned g = thread_index() / 4, t = thread_index() % 4 * 2;
  const auto pair = [](T low, T high) {
    return static_cast<std::uint32_t>(low.bits) | static_cast<std::uint32_t>(high.bits) << 16;
  };
  std::uint32_t left[4], right[2];
  float sums[4];
  for (unsigned part = 0; part < 4; ++part) {
    const unsigned row = g + part % 2 * 8, col = t + part / 2 * 8;
    left[part] = pair(read(a + row * 16 + col), read(a + row * 16 + col + 1));
    sums[part] = read(c + (g + part / 2 * 8) * 8 + t + part % 2);
  }
  for (unsigned part = 0; part < 2; ++part) {
    const unsigned row = t + part * 8;
    right[part] = pair(read(b + row * 8 + g), read(b + (row + 1) * 8 + g));
  }
  mma<T>(sums, left, right);
  for (unsigned part = 0; part < 4; ++part)
    write(d + (g + part / 2 * 8) * 8 + t + part % 2, sums[part]);
}

// out[n] = x[n] rounded to T, two at a time; n is even. Blocks of 32 pairs.
template <class T>
MONOGRAPH_KERNEL(kProbeThreads)
probe_pack_kernel(const float* x, std::size_t n, T* out) {
  const std::size_t i = 2 * (std::size_t{block_index_x()} * kProbeThreads + thread_index());
  if (i < n) write_as(out + i, pack_two<T>(read(x + i), read(x + i + 1)));
}

// out[n] = x[n] as fp32. Blocks of 32.
template <class T>
MONOGRAPH_KERNEL(kProbeThreads)
probe_widen_kernel(const T* x, std::size_t n, float* out) {
  const std::size_t i = std::size_t{block_index_x()} * kProbeThreads + thread_index();
  if (i < n) write(out + i, widen(read(x + i)));
}

enum class ProbeArithmetic : std::uint8_t { kMul, kAdd, kDiv, kFma };

// out[n] = x * y, x + y, x / y, or x * y + z rounded once. Blocks of 32.
template <ProbeArithmetic kOperation>
MONOGRAPH_KERNEL(kProbeThreads)
probe_arithmetic_kernel(const float* x, const float* y, const float* z, std::size_t n, float* out) {
  const std::size_t i = std::size_t{block_index_x()} * kProbeThreads + thread_index();
  if (i >= n) return;
  const float a = read(x + i), b = read(y + i);
  float result;
  if constexpr (kOperation == ProbeArithmetic::kMul)
    result = mul(a, b);
  else if constexpr (kOperation == ProbeArithmetic::kAdd)
    result = add(a, b);
  else if constexpr (kOperation == ProbeArithmetic::kDiv)
    result = div(a, b);
  else
    result = fma(a, b, read(z + i));
  write(out + i, result);
}

struct ProbeCopies {
  Words4 words[kProbeThreads];
};

// out[n] = bytes[n], zeros from `used` on; both are multiples of 16 and the memory is aligned to
// 16. Blocks of 32 copies.
MONOGRAPH_KERNEL(kProbeThreads)
probe_copy_async_kernel(const std::uint8_t* bytes, std::size_t n, std::size_t used,
                        std::uint8_t* out) {
  ProbeCopies& copies = shared_memory<ProbeCopies>();
  const unsigned thread = thread_index();
  const std::size_t at = 16 * (std::size_t{block_index_x()} * kProbeThreads + thread);
  if (at < n) copy_async(&copies.words[thread], bytes + at, at >= used);
  close_group();
  wait_for_groups<0>();
  sync_threads();
  // What another thread asked for: it is there for all behind the barrier.
  const unsigned other = kProbeThreads - 1 - thread;
  const std::size_t place = 16 * (std::size_t{block_index_x()} * kProbeThreads + other);
  if (place < n) write_as(out + place, read(&copies.words[other]));
}

// out[i] = x[i ^ mask], 32 lanes; one block.
MONOGRAPH_KERNEL(kProbeThreads)
probe_shuffle_xor_kernel(const float* x, unsigned mask, float* out) {
  const unsigned lane = thread_index();
  write(out + lane, shuffle_xor(read(x + lane), mask));
}

}  // namespace monograph::gpu
