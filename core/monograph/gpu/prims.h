// The instructions that kernels use beyond C++: on a GPU, and by their definition on the host
// harness (gpu/host/). The only file with inline PTX, and the only one with conditional macros.
// A kernel reads and writes memory through read() and write() alone, so that the harness sees it.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "monograph/base/float_types.h"

#if !defined(__CUDACC__)
#include <atomic>
#include <cmath>
#include <cstring>

#include "monograph/gpu/host/block.h"
#include "monograph/gpu/host/mma.h"
#endif

#if defined(__CUDACC__)
#define MONOGRAPH_DEVICE __device__ __forceinline__
#define MONOGRAPH_KERNEL(threads) __global__ void __launch_bounds__(threads)
// As many registers as leave room for this many blocks: without it ptxas spills for one more.
#define MONOGRAPH_KERNEL_BLOCKS(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
// For a loop whose arrays have to stay in registers, and for one whose body is to stand once.
#define MONOGRAPH_UNROLL _Pragma("unroll")
#define MONOGRAPH_ROLLED _Pragma("unroll 1")
#else
#define MONOGRAPH_DEVICE inline
#define MONOGRAPH_KERNEL(threads) inline void
#define MONOGRAPH_KERNEL_BLOCKS(threads, blocks) inline void
#define MONOGRAPH_UNROLL
#define MONOGRAPH_ROLLED
#endif

namespace monograph::gpu {

// 8 and 16 bytes that are read and written at once.
struct alignas(8) Words2 {
  std::uint32_t word[2];
};
struct alignas(16) Words4 {
  std::uint32_t word[4];
};

// Sums of a warp are trees over lanes that differ in one bit.
inline constexpr unsigned kLanes = 32;

// ---- bits ----

MONOGRAPH_DEVICE float as_float(std::uint32_t bits) {
#if defined(__CUDACC__)
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}
MONOGRAPH_DEVICE std::uint32_t as_bits(float x) {
#if defined(__CUDACC__)
  return __float_as_uint(x);
#else
  return std::bit_cast<std::uint32_t>(x);
#endif
}
// The exponent of a power of two.
MONOGRAPH_DEVICE unsigned log2_of(std::size_t power) {
#if defined(__CUDACC__)
  return 63u - static_cast<unsigned>(__clzll(static_cast<long long>(power)));
#else
  return static_cast<unsigned>(std::countr_zero(power));
#endif
}

// ---- fp32, each rounded once and never fused ----

MONOGRAPH_DEVICE float mul(float a, float b) {
#if defined(__CUDACC__)
  return __fmul_rn(a, b);
#else
  return a * b;  // -ffp-contract=off
#endif
}
MONOGRAPH_DEVICE float add(float a, float b) {
#if defined(__CUDACC__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
MONOGRAPH_DEVICE float sub(float a, float b) { return add(a, -b); }
MONOGRAPH_DEVICE float div(float a, float b) {
#if defined(__CUDACC__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}
MONOGRAPH_DEVICE double add64(double a, double b) {
#if defined(__CUDACC__)
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}
MONOGRAPH_DEVICE double div64(double a, double b) {
#if defined(__CUDACC__)
  return __ddiv_rn(a, b);
#else
  return a / b;
#endif
}
// a * b + c with one rounding.
MONOGRAPH_DEVICE float fma(float a, float b, float c) {
#if defined(__CUDACC__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}
// exp and tanh of the device's library: 2 units in the last place.
MONOGRAPH_DEVICE float exp_of(float x) {
#if defined(__CUDACC__)
  return ::expf(x);
#else
  return std::exp(x);
#endif
}
MONOGRAPH_DEVICE float tanh_of(float x) {
#if defined(__CUDACC__)
  return ::tanhf(x);
#else
  return std::tanh(x);
#endif
}
MONOGRAPH_DEVICE double log_of(double x) {
#if defined(__CUDACC__)
  return ::log(x);
#else
  return std::log(x);
#endif
}

// ---- 16-bit floats: the bits of from_float and to_float of base/float_types.h ----

// A GPU's own conversion makes every NaN 0x7fff; ours keeps what the CPU gives.
template <class T>
MONOGRAPH_DEVICE T round_to(float x) {
#if defined(__CUDACC__)
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    std::uint16_t bits;
    if constexpr (std::is_same_v<T, Bf16>) {
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
      if (x != x) bits = 0x7fc0;
    } else {
      asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
      const std::uint32_t u = __float_as_uint(x);
      if (x != x)
        bits = static_cast<std::uint16_t>((u >> 16 & 0x8000) | 0x7e00 | (u >> 13 & 0x3ff));
    }
    return {bits};
  }
#else
  return from_float<T>(x);
#endif
}
template <class T>
MONOGRAPH_DEVICE float widen(T x) {
#if defined(__CUDACC__)
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, Bf16>) {
    return __uint_as_float(static_cast<std::uint32_t>(x.bits) << 16);
  } else {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
  }
#else
  return to_float(x);
#endif
}

// ---- where the thread is ----

MONOGRAPH_DEVICE unsigned thread_index() {
#if defined(__CUDACC__)
  return threadIdx.x;
#else
  return host::place().thread;
#endif
}
MONOGRAPH_DEVICE unsigned block_index_x() {
#if defined(__CUDACC__)
  return blockIdx.x;
#else
  return host::place().block_x;
#endif
}
MONOGRAPH_DEVICE unsigned block_index_y() {
#if defined(__CUDACC__)
  return blockIdx.y;
#else
  return host::place().block_y;
#endif
}

// ---- memory ----

template <class T>
MONOGRAPH_DEVICE T read(const T* p) {
#if defined(__CUDACC__)
  if constexpr (std::is_same_v<T, Words4>) {
    const uint4 v = *reinterpret_cast<const uint4*>(p);
    return {{v.x, v.y, v.z, v.w}};
  } else if constexpr (std::is_same_v<T, Words2>) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    return {{v.x, v.y}};
  } else {
    return *p;
  }
#else
  host::check_read(p, sizeof(T), alignof(T));
  return *p;
#endif
}
template <class T>
MONOGRAPH_DEVICE void write(T* p, std::type_identity_t<T> value) {
#if defined(__CUDACC__)
  if constexpr (std::is_same_v<T, Words4>) {
    *reinterpret_cast<uint4*>(p) =
        uint4{value.word[0], value.word[1], value.word[2], value.word[3]};
  } else if constexpr (std::is_same_v<T, Words2>) {
    *reinterpret_cast<uint2*>(p) = uint2{value.word[0], value.word[1]};
  } else {
    *p = value;
  }
#else
  host::check_write(p, sizeof(T), alignof(T));
  *p = value;
#endif
}

// The kernel's shared memory: one object of a plain type, at most 48 KiB, with nothing in it.
template <class S>
MONOGRAPH_DEVICE S& shared_memory() {
#if defined(__CUDACC__)
  __shared__ __align__(16) unsigned char bytes[sizeof(S)];
  return *reinterpret_cast<S*>(bytes);
#else
  return *reinterpret_cast<S*>(host::shared_object(sizeof(S)));
#endif
}

// ---- threads together ----

// Every thread of the block comes to the same barrier, none has ended.
#if defined(__CUDACC__)
MONOGRAPH_DEVICE void sync_threads() { __syncthreads(); }
#else
inline void sync_threads(host::Line where = host::Line::here()) { host::barrier(where); }
#endif

// What the lane whose number differs by `mask` has. All 32 lanes come.
#if defined(__CUDACC__)
template <class T>
MONOGRAPH_DEVICE T shuffle_xor(T value, unsigned mask) {
  return __shfl_xor_sync(0xffffffffu, value, static_cast<int>(mask));
}
#else
template <class T>
T shuffle_xor(T value, unsigned mask, host::Line where = host::Line::here()) {
  T mine = value;
  const auto all = [&](void* const* lanes) {
    T in[kLanes];
    for (unsigned i = 0; i < kLanes; ++i) in[i] = *static_cast<const T*>(lanes[i]);
    for (unsigned i = 0; i < kLanes; ++i) *static_cast<T*>(lanes[i]) = in[i ^ mask];
  };
  host::warp_together(&mine, all, where);
  return mine;
}
#endif

// The smallest and largest of what threads of all blocks bring, in any order.
MONOGRAPH_DEVICE void atomic_min(std::uint64_t* at, std::uint64_t value) {
#if defined(__CUDACC__)
  atomicMin(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(value));
#else
  host::check_write(at, sizeof *at, alignof(std::uint64_t));
  std::atomic_ref<std::uint64_t> shared(*at);
  if (value < shared.load()) shared.store(value);
#endif
}
MONOGRAPH_DEVICE void atomic_max(std::uint32_t* at, std::uint32_t value) {
#if defined(__CUDACC__)
  atomicMax(at, value);
#else
  host::check_write(at, sizeof *at, alignof(std::uint32_t));
  std::atomic_ref<std::uint32_t> shared(*at);
  if (value > shared.load()) shared.store(value);
#endif
}

// ---- asynchronous copies, global to shared ----

// 16 bytes, or zeros in their place; `from` is not read then. Both are aligned to 16.
MONOGRAPH_DEVICE void copy_async(void* to, const void* from, bool zeros) {
#if defined(__CUDACC__)
  const std::uint32_t shared = static_cast<std::uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from),
               "r"(zeros ? 0 : 16)
               : "memory");
#else
  host::copy_later(to, from, 16, zeros);
#endif
}
// Those since the last one are a group.
MONOGRAPH_DEVICE void close_group() {
#if defined(__CUDACC__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  host::close_group();
#endif
}
// The thread's groups have arrived, but for the last kPending; others see them behind a barrier.
template <int kPending>
MONOGRAPH_DEVICE void wait_for_groups() {
#if defined(__CUDACC__)
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#else
  host::wait_for_groups(kPending);
#endif
}

// ---- matrix products of a warp ----

// d[16, 8] += a[16, 16] b[16, 8], elements T = Bf16 or Fp16, sums fp32: mma.sync m16n8k16. With
// g = lane / 4 and t = lane % 4 a lane holds two elements each of
//   a[0]  row g,     columns 2t, 2t + 1        b[0]  column g, rows 2t, 2t + 1
//   a[1]  row g + 8, the same                  b[1]  column g, rows 2t + 8, 2t + 9
//   a[2]  row g,     columns 2t + 8, 2t + 9    d[0], d[1]  row g,     columns 2t, 2t + 1
//   a[3]  row g + 8, the same                  d[2], d[3]  row g + 8, the same
// The hardware's order of the sixteen products, and its rounding between them, are its own.
#if defined(__CUDACC__)
template <class T>
MONOGRAPH_DEVICE void mma(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, Bf16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}
#else
template <class T>
void mma(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
         host::Line where = host::Line::here()) {
  host::MmaLane mine = {d, a, b};
  const auto all = [](void* const* lanes) { host::mma_by_definition<T>(lanes); };
  host::warp_together(&mine, all, where);
}
#endif

}  // namespace monograph::gpu

#include "monograph/gpu/derived.h"
