// The instructions of core/monograph/gpu/prims.h for AMD, by the compiler's own builtins: this
// folder comes before core/ on the include path of a HIP compilation. Compiled, never run.
//
// A warp is 32 lanes here too. On hardware with waves of 64 (gfx90a, gfx942) it is half a wave:
// lanes are exchanged inside a half alone, and what crosses threads goes through barriers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "monograph/base/float_types.h"

#define MONOGRAPH_DEVICE inline __attribute__((device, always_inline))
#define MONOGRAPH_KERNEL(threads) \
  __attribute__((global, amdgpu_flat_work_group_size(threads, threads))) void
#define MONOGRAPH_KERNEL_BLOCKS(threads, blocks) MONOGRAPH_KERNEL(threads)
#define MONOGRAPH_UNROLL _Pragma("unroll")
#define MONOGRAPH_ROLLED _Pragma("unroll 1")

namespace monograph::gpu {

struct alignas(8) Words2 {
  std::uint32_t word[2];
};
struct alignas(16) Words4 {
  std::uint32_t word[4];
};

inline constexpr unsigned kLanes = 32;

// ---- bits ----

MONOGRAPH_DEVICE float as_float(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }
MONOGRAPH_DEVICE std::uint32_t as_bits(float x) { return __builtin_bit_cast(std::uint32_t, x); }
MONOGRAPH_DEVICE unsigned log2_of(std::size_t power) {
  return 63u - static_cast<unsigned>(__builtin_clzll(power));
}

// ---- fp32, each rounded once and never fused: -ffp-contract=off ----

MONOGRAPH_DEVICE float mul(float a, float b) { return a * b; }
MONOGRAPH_DEVICE float add(float a, float b) { return a + b; }
MONOGRAPH_DEVICE float sub(float a, float b) { return a - b; }
MONOGRAPH_DEVICE float div(float a, float b) { return a / b; }
MONOGRAPH_DEVICE double add64(double a, double b) { return a + b; }
MONOGRAPH_DEVICE double div64(double a, double b) { return a / b; }
MONOGRAPH_DEVICE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// Of ROCm's device library, which a link brings.
extern "C" __attribute__((device)) float __ocml_exp_f32(float);
extern "C" __attribute__((device)) float __ocml_tanh_f32(float);
extern "C" __attribute__((device)) double __ocml_log_f64(double);
MONOGRAPH_DEVICE float exp_of(float x) { return __ocml_exp_f32(x); }
MONOGRAPH_DEVICE float tanh_of(float x) { return __ocml_tanh_f32(x); }
MONOGRAPH_DEVICE double log_of(double x) { return __ocml_log_f64(x); }

// ---- 16-bit floats ----

template <class T>
MONOGRAPH_DEVICE T round_to(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    const std::uint32_t u = as_bits(x);
    std::uint16_t bits;
    if constexpr (std::is_same_v<T, Bf16>) {
      bits = x != x ? std::uint16_t{0x7fc0}
                    : static_cast<std::uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
    } else {
      bits = __builtin_bit_cast(std::uint16_t, static_cast<_Float16>(x));
      if (x != x)
        bits = static_cast<std::uint16_t>((u >> 16 & 0x8000) | 0x7e00 | (u >> 13 & 0x3ff));
    }
    return {bits};
  }
}
template <class T>
MONOGRAPH_DEVICE float widen(T x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else if constexpr (std::is_same_v<T, Bf16>)
    return as_float(static_cast<std::uint32_t>(x.bits) << 16);
  else
    return static_cast<float>(__builtin_bit_cast(_Float16, x.bits));
}

// ---- where the thread is ----

MONOGRAPH_DEVICE unsigned thread_index() { return __builtin_amdgcn_workitem_id_x(); }
MONOGRAPH_DEVICE unsigned block_index_x() { return __builtin_amdgcn_workgroup_id_x(); }
MONOGRAPH_DEVICE unsigned block_index_y() { return __builtin_amdgcn_workgroup_id_y(); }

// ---- memory ----

template <class T>
MONOGRAPH_DEVICE T read(const T* p) {
  return *p;
}
template <class T>
MONOGRAPH_DEVICE void write(T* p, std::type_identity_t<T> value) {
  *p = value;
}

template <class S>
MONOGRAPH_DEVICE S& shared_memory() {
  static __attribute__((shared, aligned(16))) unsigned char bytes[sizeof(S)];
  return *reinterpret_cast<S*>(bytes);
}

// ---- threads together ----

MONOGRAPH_DEVICE void sync_threads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// Of the half of the wave that the lane is in: `mask` is below 32.
template <class T>
MONOGRAPH_DEVICE T shuffle_xor(T value, unsigned mask) {
  static_assert(sizeof(T) % 4 == 0);
  struct Words {
    int word[sizeof(T) / 4];
  };
  const unsigned lane = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
  Words words = __builtin_bit_cast(Words, value);
  for (int& word : words.word)
    word = __builtin_amdgcn_ds_bpermute(static_cast<int>((lane ^ mask) * 4), word);
  return __builtin_bit_cast(T, words);
}

MONOGRAPH_DEVICE void atomic_min(std::uint64_t* at, std::uint64_t value) {
  __hip_atomic_fetch_min(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
MONOGRAPH_DEVICE void atomic_max(std::uint32_t* at, std::uint32_t value) {
  __hip_atomic_fetch_max(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// ---- copies, global to shared: at once, and nothing is left to wait for ----

MONOGRAPH_DEVICE void copy_async(void* to, const void* from, bool zeros) {
  write(static_cast<Words4*>(to), zeros ? Words4{} : read(static_cast<const Words4*>(from)));
}
MONOGRAPH_DEVICE void close_group() {}
template <int kPending>
MONOGRAPH_DEVICE void wait_for_groups() {}

// ---- matrix products of a warp ----

template <class T>
MONOGRAPH_DEVICE void mma(float (&)[4], const std::uint32_t (&)[4], const std::uint32_t (&)[2]) {
  static_assert(!std::is_same_v<T, T>,
                "mma: no matrix instruction of AMD has the places of m16n8k16; kernels with it are "
                "not for AMD");
}

}  // namespace monograph::gpu

#include "monograph/gpu/derived.h"
