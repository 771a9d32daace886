// The only file that asks an x86 CPU what it can do.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "monograph/cpu/isa.h"

namespace monograph {
namespace {

// arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA): Linux grants a process the 8 KiB of tiles on request.
constexpr long kRequestPermission = 0x1023;
constexpr long kTileData = 18;

bool has_amx() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  const bool bf16 = edx >> 22 & 1, tile = edx >> 24 & 1, int8 = edx >> 25 & 1;
  if (!bf16 || !tile || !int8) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Intel's cores from Sapphire Rapids on, which are those with FP16, start VDPBF16PS every second
// cycle where they start two multiply-adds every cycle: half the products. One whose tiles a
// hypervisor or an old kernel withholds is faster without.
bool has_slow_bf16() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  return __builtin_cpu_is("intel") && (edx >> 23 & 1) != 0;
}

Isa detect() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("bmi2"))
    return Isa::kScalar;
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx >> 29 & 1)) return Isa::kScalar;  // F16C
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return Isa::kAvx2;
  if (!__builtin_cpu_supports("avx512bf16")) return Isa::kAvx512;
  if (__builtin_cpu_supports("avx512vbmi") && has_amx()) return Isa::kAmx;
  return has_slow_bf16() ? Isa::kAvx512 : Isa::kAvx512Bf16;
}

}  // namespace

Isa detected_isa() {
  static const Isa isa = detect();
  return isa;
}

bool has_sha_extensions() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (ebx >> 29 & 1) != 0;
}

}  // namespace monograph
